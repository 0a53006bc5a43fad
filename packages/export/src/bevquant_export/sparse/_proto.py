"""A file of either dialect as a graph, with all checks, and a graph as a file.

Standard operators do not say which convolution they come from. The portable file's metadata does,
in the attributes of the libspconv dialect; weights stay where the operators read them. The metadata
is accepted only where writing it again gives the same model.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export._cpu import mark_cpu
from bevquant_export._size_guards import guards_of, note_guards
from bevquant_export.sparse._check_graph import check_graph
from bevquant_export.sparse._graph import Conv, Graph, Node
from bevquant_export.sparse._lower import Lowered, lowered
from bevquant_export.sparse._node_attributes import (
    EXTENSIONS,
    OPERATORS,
    node_attributes,
    operator_of,
    read_node,
)
from bevquant_export.sparse._weights import read_half, read_weight
from bevquant_export.voxels._body import DOMAIN
from bevquant_graph import file_path

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

_KEY = DOMAIN
_VERSION = 1
_BEFORE = "all uint8"  # the weights of files that do not say how they store theirs


def recorded(graph: Graph, *, all_layers: bool) -> Lowered:
    """The model of a graph, with the graph in its metadata."""
    content = {
        "version": _VERSION,
        "all_layers": all_layers,
        "input": graph.input,
        "channels": graph.channels,
        "outputs": graph.outputs,
        "nodes": [_written(node) for node in graph.nodes],
    }
    if graph.weights != _BEFORE:
        content["weights"] = graph.weights
    if graph.features != "features":
        content["features"] = graph.features
    record = {_KEY: json.dumps(content, separators=(",", ":"))}
    made = lowered(graph, record, all_layers=all_layers)
    mark_cpu(made.model)
    return made


def portable_graph(model: ModelProto) -> Graph:
    """The graph that a portable model was written from."""
    kept = [entry.value for entry in model.metadata_props if entry.key == _KEY]
    if len(kept) != 1:
        raise ValueError(f"{len(kept)} metadata entries {_KEY!r}; expected one: export it again")
    try:
        content = json.loads(kept[0])
        if content["version"] != _VERSION:
            raise ValueError(f"metadata of version {content['version']!r}; expected {_VERSION}")
        graph = _read(content, model)
        all_layers = content["all_layers"] is True
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"the metadata {_KEY!r} are damaged ({error!r})") from error
    check_graph(graph)
    again = recorded(graph, all_layers=all_layers).model
    if _operators(again) != _operators(model):
        raise ValueError(
            "its operators are not those that its metadata describe: it was changed, or written by "
            "another version; export it again"
        )
    return graph


def _operators(model: ModelProto) -> bytes:
    """The file without later metadata, such as the verification."""
    plain = type(model)()
    plain.CopyFrom(model)
    own = [entry for entry in model.metadata_props if entry.key == _KEY]
    del plain.metadata_props[:]
    plain.metadata_props.extend(own)
    content: bytes = plain.SerializeToString(deterministic=True)
    return content


def _written(node: Node) -> dict[str, Any]:
    attributes = node_attributes(node)
    attributes.pop("body", None)  # a function of the file
    return {
        "op": operator_of(node),
        "name": node.name,
        "path": node.path,
        "inputs": node.inputs,
        "output": node.y,
        "attributes": attributes,
    }


def _read(content: dict[str, Any], model: ModelProto) -> Graph:
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    bodies = {f.name: f for f in model.functions if f.domain == DOMAIN}
    nodes = tuple(_node(entry, tensors, bodies) for entry in content["nodes"])
    outputs, weights = content["outputs"], content.get("weights")
    if not nodes or not outputs or not all(isinstance(name, str) for name in outputs):
        raise ValueError("it has no nodes or no outputs")
    return Graph(
        input=str(content["input"]),
        channels=int(content["channels"]),
        nodes=nodes,
        outputs=tuple(outputs),
        weights=weights if weights in ("uint8", "int8") else _BEFORE,
        features=str(content.get("features", "features")),
        bounded=False,
    )


def _node(entry: dict[str, Any], tensors: dict[str, Any], bodies: dict[str, Any]) -> Node:
    from onnx import helper

    name, attributes = str(entry["name"]), entry["attributes"]
    if entry["op"] == "Steps":
        attributes = {**attributes, "body": bodies[name].SerializeToString(deterministic=True)}
    known: dict[str, Tensor] = {}
    inputs = [str(x) for x in entry["inputs"]]
    if entry["op"] == "SparseConvolution":
        known = {
            f"{name}.weight": read_weight(name, attributes, tensors),
            f"{name}.bias": read_half(f"{name}.bias", tensors),
        }
        inputs += known
    proto = helper.make_node(
        str(entry["op"]), inputs, [str(entry["output"])], name, doc_string=str(entry["path"]),
        **attributes,
    )  # fmt: skip
    return read_node(proto, known, name)


_MOST_BYTES = 1 << 30


def read_graph(path: str | os.PathLike[str]) -> Graph:
    """Read and check a file. No other file is opened."""
    file = file_path(path, "ONNX file")
    try:
        return graph_of_bytes(_content(file))
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from error


def graph_of_bytes(content: bytes, *, extensions: bool = False) -> Graph:
    """The checked graph of a file's content.

    With `extensions`, operators of the portable dialect are accepted.
    """
    model = _parsed(content)
    guards = guards_of(model)
    if any(entry.domain == DOMAIN for entry in model.opset_import):
        return replace(portable_graph(model), guards=guards)
    graph = _graph(model.graph, (*OPERATORS, *EXTENSIONS) if extensions else OPERATORS)
    check_graph(graph)
    return replace(graph, guards=guards)


def _content(file: Path) -> bytes:
    if not file.is_file():
        raise ValueError(f"no such file as {file}")
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{file.stat().st_size} bytes; expected at most {_MOST_BYTES}")
    return file.read_bytes()


def _parsed(content: bytes) -> ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        return onnx.load_model_from_string(content)
    except DecodeError as error:
        raise ValueError(f"not an ONNX file ({error}); is it a Git LFS pointer?") from error


def _graph(proto: GraphProto, known: tuple[str, ...]) -> Graph:
    _check_text(proto)
    tensors = read_tensors(proto)
    inputs = [value for value in proto.input if value.name not in tensors]
    if len(inputs) != 1:
        names = [value.name for value in inputs]
        raise ValueError(f"expected one input, the features of the voxels, got {names}")
    if not proto.node or not proto.output:
        raise ValueError("it has no nodes or no outputs")
    unknown = sorted({node.op_type for node in proto.node} - set(known))
    if unknown:
        raise ValueError(
            f"operators {', '.join(unknown)}: a libspconv file has {', '.join(OPERATORS)} only"
        )
    nodes: list[Node] = [
        read_node(node, tensors, node.name or f"node {i}") for i, node in enumerate(proto.node)
    ]
    sizes = [d.dim_value for d in inputs[0].type.tensor_type.shape.dim]
    shapes = {
        value.name: tuple(int(d.dim_value) for d in value.type.tensor_type.shape.dim)
        for value in proto.output
    }
    return Graph(
        input=inputs[0].name,
        channels=int(sizes[1]) if len(sizes) == 2 else 0,
        nodes=tuple(nodes),
        outputs=tuple(value.name for value in proto.output),
        shapes=shapes,
    )


def _check_text(proto: GraphProto) -> None:
    """Names that are not UTF-8 arrive as bytes, which no reader expects."""
    texts = [value.name for value in (*proto.input, *proto.output, *proto.initializer)]
    for node in proto.node:
        texts += [node.op_type, node.name, node.doc_string, *node.input, *node.output]
        texts += [attribute.name for attribute in node.attribute]
    broken = next((text for text in texts if not isinstance(text, str)), None)
    if broken is not None:
        raise ValueError(f"the name {broken!r} is not UTF-8")


def read_tensors(proto: GraphProto) -> Mapping[str, Tensor]:
    """Name to float16 tensor: finite, of its shape, as raw bytes in the file, each name once."""
    from onnx import TensorProto

    found: dict[str, Tensor] = {}
    for tensor in proto.initializer:
        name, dims = tensor.name, [int(d) for d in tensor.dims]
        if tensor.data_type != TensorProto.FLOAT16:
            kind = TensorProto.DataType.Name(tensor.data_type)
            raise ValueError(f"initializer {name} is {kind}; the engine reads FLOAT16")
        if tensor.data_location == TensorProto.EXTERNAL or not tensor.HasField("raw_data"):
            raise ValueError(f"initializer {name} is not in raw_data, where the engine reads it")
        if min(dims, default=1) < 1 or len(tensor.raw_data) != 2 * math.prod(dims):
            raise ValueError(f"initializer {name} of shape {dims} has {len(tensor.raw_data)} bytes")
        if name in found:
            raise ValueError(f"two initializers are called {name}")
        values = np.frombuffer(tensor.raw_data, "<f2").reshape(dims)
        if not np.isfinite(values).all():
            raise ValueError(f"initializer {name} holds NaN or infinity")
        found[name] = torch.from_numpy(values.astype(np.float16))
    return found


_OPSET, _IR_VERSION = 11, 7


def proto_bytes(graph: Graph) -> bytes:
    """The file: an ONNX model with one opset import, all weights raw float16.

    Attributes are sorted by name, as by `onnx.helper.make_node`. The module of a node is its
    documentation string.
    """
    from onnx import TensorProto, helper

    half = TensorProto.FLOAT16
    nodes: list[NodeProto] = []
    initializers: list[TensorProto] = []
    convs = 0
    for node in graph.nodes:
        names = [*node.inputs]
        if isinstance(node, Conv):
            weights = {f"spconv{convs}.weight": node.weight, f"spconv{convs}.bias": node.bias}
            initializers += [_initializer(name, value) for name, value in weights.items()]
            names += weights
            convs += 1
        made = helper.make_node(
            operator_of(node),
            names,
            [node.y],
            node.name,
            doc_string=node.path,
            **node_attributes(node),
        )
        nodes.append(made)
    outputs = [
        helper.make_tensor_value_info(name, half, graph.shapes.get(name)) for name in graph.outputs
    ]
    whole = helper.make_graph(
        nodes,
        "scn",
        [helper.make_tensor_value_info(graph.input, half, [1, graph.channels])],
        outputs,
        initializers,
    )
    model = helper.make_model(
        whole,
        opset_imports=[helper.make_operatorsetid("ai.onnx", _OPSET)],
        producer_name="bevquant_export",
        ir_version=_IR_VERSION,
    )
    note_guards(model, graph.guards)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def _initializer(name: str, value: Tensor) -> TensorProto:
    from onnx import TensorProto, helper

    raw = value.contiguous().numpy().astype("<f2").tobytes()
    return helper.make_tensor(name, TensorProto.FLOAT16, list(value.shape), raw, raw=True)
