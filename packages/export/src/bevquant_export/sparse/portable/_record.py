"""A graph in the metadata of its portable file, and back.

Standard operators do not say which convolution they come from. The file's metadata does, in the
attributes of the libspconv dialect; weights stay where the operators read them. What the metadata
says is believed only where writing it again gives the very same model.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export.sparse._check_graph import check_graph
from bevquant_export.sparse._graph import Graph, Node, inputs_of
from bevquant_export.sparse._read_node import read_node
from bevquant_export.sparse._write_proto import node_attributes, operator_of
from bevquant_export.sparse.portable._body import DOMAIN
from bevquant_export.sparse.portable._lower import Lowered, lowered

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["is_portable", "portable_graph", "recorded"]

_KEY = DOMAIN
_VERSION = 1
_ZERO, _STEPS = 128, 127


def recorded(graph: Graph, *, all_layers: bool) -> Lowered:
    """The model of a graph, with the graph in its metadata.

    Raises:
        ValueError: As `lowered`.
    """
    content = {
        "version": _VERSION,
        "all_layers": all_layers,
        "input": graph.input,
        "channels": graph.channels,
        "outputs": graph.outputs,
        "nodes": [_written(node) for node in graph.nodes],
    }
    record = {_KEY: json.dumps(content, separators=(",", ":"))}
    return lowered(graph, record, all_layers=all_layers)


def is_portable(model: ModelProto) -> bool:
    """Whether a model is, or claims to be, a portable sparse encoder."""
    return any(entry.domain == DOMAIN for entry in model.opset_import)


def portable_graph(model: ModelProto) -> Graph:
    """The graph that a portable model was written from.

    Raises:
        ValueError: The metadata is missing or broken, or the model is not what it says.
    """
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
    if again.SerializeToString(deterministic=True) != model.SerializeToString(deterministic=True):
        raise ValueError(
            "its operators are not those that its metadata describe: it was changed, or written by "
            "another version; export it again"
        )
    return graph


def _written(node: Node) -> dict[str, Any]:
    return {
        "op": operator_of(node),
        "name": node.name,
        "path": node.path,
        "inputs": inputs_of(node),
        "output": node.y,
        "attributes": node_attributes(node),
    }


def _read(content: dict[str, Any], model: ModelProto) -> Graph:
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = tuple(_node(entry, tensors) for entry in content["nodes"])
    outputs = content["outputs"]
    if not nodes or not outputs or not all(isinstance(name, str) for name in outputs):
        raise ValueError("it has no nodes or no outputs")
    return Graph(
        input=str(content["input"]),
        channels=int(content["channels"]),
        nodes=nodes,
        outputs=tuple(outputs),
    )


def _node(entry: dict[str, Any], tensors: dict[str, Any]) -> Node:
    from onnx import helper

    name, attributes = str(entry["name"]), entry["attributes"]
    known: dict[str, Tensor] = {}
    inputs = [str(x) for x in entry["inputs"]]
    if entry["op"] == "SparseConvolution":
        known = {
            f"{name}.weight": _weight(name, attributes, tensors),
            f"{name}.bias": _half(tensors.get(f"{name}.bias"), f"{name}.bias"),
        }
        inputs += known
    proto = helper.make_node(
        str(entry["op"]), inputs, [str(entry["output"])], name, doc_string=str(entry["path"]),
        **attributes,
    )  # fmt: skip
    return read_node(proto, known, name)


def _weight(name: str, attributes: dict[str, Any], tensors: dict[str, Any]) -> Tensor:
    """float16 KRSC; integers become the values they stand for."""
    tensor = tensors.get(f"{name}.weight")
    if tensor is None or len(tensor.dims) != 2:
        raise ValueError(f"{name}: initializer {name}.weight is missing, or no matrix")
    shape = (int(attributes["out_channels"]), *attributes["kernel_size"], -1)
    if attributes["precision"] != "int8":
        return _krsc(_half(tensor, f"{name}.weight"), shape, name)
    raw = np.frombuffer(tensor.raw_data, np.uint8)
    if len(raw) != math.prod(tensor.dims):
        raise ValueError(f"{name}: initializer {name}.weight is not UINT8 of its shape")
    q = _krsc(torch.from_numpy(raw.reshape(list(tensor.dims)).astype(np.int16)), shape, name)
    ranges = torch.tensor(attributes["weight_dynamic_ranges"], dtype=torch.float64)
    if len(ranges) != len(q):
        raise ValueError(f"{name}: {len(ranges)} weight ranges for {len(q)} channels")
    return ((q.double() - _ZERO) * (ranges / _STEPS).view(-1, 1, 1, 1, 1)).half()


def _half(tensor: Any, name: str) -> Tensor:
    if (
        tensor is None
        or tensor.data_type != 10
        or len(tensor.raw_data) != 2 * math.prod(tensor.dims)
    ):
        raise ValueError(f"initializer {name} is missing, or not FLOAT16 of its shape")
    values = np.frombuffer(tensor.raw_data, "<f2").reshape(list(tensor.dims)).astype(np.float16)
    if not np.isfinite(values).all():
        raise ValueError(f"initializer {name} holds NaN or infinity")
    return torch.from_numpy(values)


def _krsc(matrix: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """``[kernel · in, out]`` to KRSC."""
    try:
        return matrix.t().reshape(shape).contiguous()
    except RuntimeError as error:
        raise ValueError(f"{name}: a weight of shape {list(matrix.shape)} for {shape}") from error
