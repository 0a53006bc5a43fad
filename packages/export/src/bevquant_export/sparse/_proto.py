"""A file of either dialect as a graph, with all checks; a graph as bytes of libspconv's dialect."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bevquant_export._size_guards import guards_of, note_guards
from bevquant_export.sparse._check_graph import check_graph
from bevquant_export.sparse._graph import Conv, Graph, Node
from bevquant_export.sparse._node_attributes import (
    EXTENSIONS,
    OPERATORS,
    node_attributes,
    operator_of,
    read_node,
)
from bevquant_export.sparse.portable._record import is_portable, portable_graph

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

_MOST_BYTES = 1 << 30


def read_graph(path: str | os.PathLike[str]) -> Graph:
    """Read and check a file. No other file is opened.

    Raises:
        ValueError: The file is not ONNX or is outside the dialect; the message starts with the file
            and names the node.
    """
    file = Path(path)
    try:
        return graph_of_bytes(_content(file))
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from error


def graph_of_bytes(content: bytes, *, extensions: bool = False) -> Graph:
    """The checked graph of a file's content.

    Args:
        content: The file.
        extensions: Accept operators of the portable dialect, which is written from this graph.

    Raises:
        ValueError: As `read_graph`, without the file's name.
    """
    model = _parsed(content)
    guards = guards_of(model)
    if is_portable(model):
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
    """Name to float16 tensor.

    Raises:
        ValueError: A tensor has another type, is not stored as raw bytes in the file, has another
            length than its shape, is not finite, or is named twice.
    """
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
