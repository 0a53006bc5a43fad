"""A graph in the metadata of its portable file, and back.

Standard operators do not say which convolution they come from. The file's metadata does, in the
attributes of the libspconv dialect; weights stay where the operators read them. What the metadata
says is believed only where writing it again gives the very same model.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bevquant_export.sparse._check_graph import check_graph
from bevquant_export.sparse._graph import Graph, Node
from bevquant_export.sparse._node_attributes import node_attributes, operator_of, read_node
from bevquant_export.sparse.portable._body import DOMAIN
from bevquant_export.sparse.portable._lower import Lowered, lowered
from bevquant_export.sparse.portable._weights import read_half, read_weight
from bevquant_export.targets._cpu import mark_cpu

if TYPE_CHECKING:
    from onnx import ModelProto

_KEY = DOMAIN
_VERSION = 1
_BEFORE = "all uint8"  # the weights of files that do not say how they store theirs


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
    if graph.weights != _BEFORE:
        content["weights"] = graph.weights
    if graph.features != "features":
        content["features"] = graph.features
    record = {_KEY: json.dumps(content, separators=(",", ":"))}
    made = lowered(graph, record, all_layers=all_layers)
    mark_cpu(made.model)
    return made


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
    if _operators(again) != _operators(model):
        raise ValueError(
            "its operators are not those that its metadata describe: it was changed, or written by "
            "another version; export it again"
        )
    return graph


def _operators(model: ModelProto) -> bytes:
    """The file without what others may have noted in its metadata, such as who verified it."""
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
