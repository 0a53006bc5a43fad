"""Where a detector is split: after ``dense()`` and the permute and reshape of its result.

Each value of the graph depends on voxels, on maps, on both or on neither. Values of voxels alone
are the sparse part; everything else that a result needs is the dense part. A value of both has no
place in either.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from bevquant_export._errors import UnsplitError
from bevquant_graph import Graph, named_results, nodes_behind, op_spec, part_of
from bevquant_int8sim.program import integers_of

_ON_VOXELS = frozenset({"rulebook", "sparse_layer", "sparse_pool", "to_dense"})
_VOXELS, _MAPS = "voxels", "maps"
_MAP = "spatial_features"
_WHOLE = "export_qdq_onnx(profile='onnxruntime') writes the whole model as one file for a CPU"


@dataclass(frozen=True, eq=False)
class Parts:
    """A graph in two parts."""

    # From the inputs of the whole to `maps` and the returned sparse tensors; None without
    # voxels
    sparse: Graph | None
    # From `maps`, and other inputs of the whole, to the other results; None where the model
    # computes nothing else
    dense: Graph | None
    maps: Mapping[str, fx.Node]  # Name to the node of the whole graph at the split
    given: Mapping[str, fx.Node]  # The same for every input of the dense part
    # Results of the whole that the sparse part computes, to their names there
    of_sparse: Mapping[str, str]
    of_dense: tuple[str, ...]  # Results of the whole that the dense part computes, in order
    # Results without a file: inputs returned unchanged, and values of coordinates alone
    left_out: tuple[str, ...]


def parts_of(graph: Graph) -> Parts:
    """Split a model; a value of voxels and maps is refused."""
    return _Cut(graph).parts()


class _Cut:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.results = named_results(graph)
        self.inputs = dict(zip(graph.placeholders, graph.input_names, strict=True))
        self.returned = {value for value in graph.outputs if isinstance(value, fx.Node)}
        self.ends = [_end(n, self.returned) for n in graph.operations if _becomes_map(n)]
        self.sizes = {_number(size) for n in self.ends for size in n.meta["val"].shape} - {""}
        self.of: dict[fx.Node, frozenset[str]] = {}
        for node in graph.graph.nodes:
            self.of[node] = self._of(node)
        layers = [n for n in graph.operations if op_spec(n.target).kind in _ON_VOXELS]
        self.of_voxels = self.inputs.keys() & set(nodes_behind(graph, layers))

    def _of(self, node: fx.Node) -> frozenset[str]:
        """Kinds of values that a value depends on; a size of a map is known wherever the map is."""
        if node in self.ends:
            return frozenset({_MAPS})
        if _number(node.meta.get("val")) in self.sizes or node.op == "placeholder":
            return frozenset()
        found = frozenset[str]().union(*(self.of[n] for n in node.all_input_nodes))
        voxels = node.op == "call_function" and op_spec(node.target).kind in _ON_VOXELS
        return found | {_VOXELS} if voxels else found

    def parts(self) -> Parts:
        """The cut."""
        kinds = {name: self._kind(self._node(tree)) for name, tree in self.results.items()}
        of_sparse = [name for name, kind in kinds.items() if kind == "sparse"]
        of_dense = [name for name, kind in kinds.items() if kind == "dense"]
        outputs = [self._node(self.results[name]) for name in of_dense]
        needed = nodes_behind(self.graph, outputs, self.ends)
        self._refuse_both(needed)
        read = [n for n in self.ends if n in needed or n in self.returned]
        ports = [_MAP] if len(read) == 1 else [f"{_MAP}_{i}" for i in range(len(read))]
        maps = dict(zip(ports, read, strict=True))
        given = {name: node for name, node in maps.items() if node in needed}
        for node in self.inputs:
            if node in needed and _number(node.meta.get("val")) not in self.sizes:
                given[_unique(self.inputs[node], given)] = node
        taken: dict[str, str] = {}
        for name in of_sparse:
            port = next((p for p, n in maps.items() if n is self._node(self.results[name])), "")
            taken[name] = port or _unique(_named(name), {*maps, *taken.values()})
        made: dict[str, Any] = {**maps, **{
            port: self.results[name] for name, port in taken.items() if port not in maps
        }}  # fmt: skip
        if not made and not of_dense:
            raise ValueError(
                "export_detector: nothing that the model returns is computed by layers: "
                f"{', '.join(self.results) or 'no tensor'}"
            )
        results = {name: self.results[name] for name in of_dense}
        return Parts(
            sparse=part_of(self.graph, made) if made else None,
            dense=part_of(self.graph, results, given) if results else None,
            maps=maps,
            given=given,
            of_sparse=taken,
            of_dense=tuple(of_dense),
            left_out=tuple(name for name, kind in kinds.items() if not kind),
        )

    def _node(self, result: Any) -> fx.Node:
        """Node of a result; for a sparse tensor that of its features."""
        node: fx.Node = self.graph.outputs[getattr(result, "features", result).index]
        return node

    def _kind(self, node: fx.Node) -> str:
        """Part of a result: ``"sparse"`` or ``"dense"``; "" where no file holds it."""
        if self.of[node] == {_VOXELS} or node in self.ends:
            return "sparse" if node.meta["val"].is_floating_point() else ""
        if self.of[node]:
            return "dense"
        read = nodes_behind(self.graph, [node])
        calls = (n.target for n in read if n.op == "call_function")
        computes = any(op_spec(target).kind != "identity" for target in calls)
        return "dense" if computes and self.of_voxels.isdisjoint(read) else ""

    def _refuse_both(self, needed: list[fx.Node]) -> None:
        """Refuse values of voxels and maps, and values of maps and of the source of voxels."""
        calls = [node for node in needed if node.op == "call_function"]
        met = [(n, "reads maps and what lies on voxels") for n in calls if len(self.of[n]) > 1]
        if self.ends:
            read = [(n, name) for n in calls for name in self._voxel_inputs(n)]
            met += [(n, f"reads {name}, of which voxels are made") for n, name in read]
        for node, what in met:
            place = self.graph.describe(node)
            raise UnsplitError(
                f"export_detector: {place} {what}: the dense part takes maps "
                "of dense(), and no voxels beside them. Return map and sparse tensor and do this "
                f"behind the files, or {_WHOLE}",
                place,
            )

    def _voxel_inputs(self, node: fx.Node) -> list[str]:
        """Input tables that a node reads and voxels are computed from."""
        read = [n for n in node.all_input_nodes if n in self.of_voxels]
        return [self.inputs[n] for n in read if isinstance(n.meta.get("val"), Tensor)]


def quantize_first(dense: Graph, name: str, form: Any) -> None:
    """Let the dense part round a map to `form` before any other operation on it."""
    port = dict(zip(dense.input_names, dense.placeholders, strict=True))[name]
    reader = next((n for n in nodes_from(port) if _rounds_to(dense, n, form)), None)
    if reader is None:
        return
    read = reader.args[0]
    # The whole integer model computes these integers first, then pads and resizes them.
    with dense.graph.inserting_before(next(iter(dense.operations))):
        made = dense.graph.node_copy(reader, lambda node: port if node is read else node)
    made.meta["val"] = port.meta["val"]
    port.replace_all_uses_with(made, delete_user_cb=lambda node: node is not made)


def _rounds_to(graph: Graph, node: fx.Node, form: Any) -> bool:
    """Whether a node is a quantizer with these integers."""
    if op_spec(node.target).kind != "quantize":
        return False
    quantizer: Any = graph.module(node)
    return bool(integers_of(quantizer, graph.path(node)) == form)


def nodes_from(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes downstream of a value, the nearest first."""
    found: dict[fx.Node, None] = {}
    pending = deque(node.users)
    while pending:
        reader = pending.popleft()
        if reader not in found and reader.op == "call_function":
            found[reader] = None
            pending += reader.users
            yield reader


def _becomes_map(node: fx.Node) -> bool:
    """Whether it computes a map that is not turned into voxels again."""
    if op_spec(node.target).kind != "to_dense":
        return False
    return all(op_spec(reader.target).kind not in _ON_VOXELS for reader in nodes_from(node))


def _end(node: fx.Node, returned: Collection[fx.Node]) -> fx.Node:
    """The last permute or reshape of a map, along values with a single consumer."""
    while node not in returned:
        readers = [n for n in node.users if op_spec(n.target).kind != "size"]
        if len(readers) != 1 or not _keeps_frames(node, readers[0]):
            break
        node = readers[0]
    return node


def _keeps_frames(node: fx.Node, reader: fx.Node) -> bool:
    """Whether a consumer permutes or reshapes without moving the first axis, the frames."""
    spec = op_spec(reader.target)
    if reader.args[:1] != (node,):
        return False
    if spec.kind == "identity":
        return True
    if spec.layout == "reshape" and not spec.like:
        before, behind = node.meta["val"], reader.meta["val"]
        return isinstance(behind, Tensor) and str(before.shape[0]) == str(behind.shape[0])
    if spec.layout != "permute":
        return False
    probe = torch.empty(*range(2, 2 + node.meta["val"].dim()), device="meta")
    target: Any = reader.target
    return bool(target(probe, *reader.args[1:], **reader.kwargs).shape[0] == 2)


def _number(value: Any) -> str:
    """The expression of an open number; "" for other values."""
    return str(value.node.expr) if isinstance(value, SymInt) else ""


def _named(result: str) -> str:
    """A result as a file's output; bare numbers are libspconv's names of tensors."""
    return f"output_{result}".strip("_") if not result or result[0].isdigit() else result


def _unique(name: str, taken: Collection[str]) -> str:
    plain = re.sub(r"\W+", "_", name).strip("_") or "input"
    return next(n for n in (plain, *(f"{plain}_{i}" for i in range(2, 10**6))) if n not in taken)
