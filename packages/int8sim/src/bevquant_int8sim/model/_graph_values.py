"""The values of a captured graph under the names that a program has for them.

Tensors, constants and numbers keep their nodes' names; a sparse tensor is taken apart into features
and coordinates, which are named by where they come from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from bevquant_graph import OPAQUE, Graph, Guard, called_name, op_spec
from bevquant_int8sim.model._coords import COORD_TYPES, Geometry, convolved_coords
from bevquant_int8sim.model._form import Form
from bevquant_int8sim.model._operation import Operation
from bevquant_int8sim.model._step import Ref, SparseRef
from bevquant_quantizers import AffineQuantizer, TensorQuantizer

_ON_VOXELS = (
    "rulebook", "sparse_layer", "sparse_pool", "quantize", "norm", "relu", "add", "concat",
    "identity", "size",
)  # fmt: skip


class GraphValues:
    """Facts about a graph's values, and the operations that make them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.operations: list[Operation] = []
        self.sparse_inputs: dict[str, str] = {}
        self.natural: dict[str, Form] = {}
        self.nodes: dict[str, fx.Node] = {}
        self._made: dict[str, Operation] = {}
        self._hosts: set[str] = set()
        self._refs: dict[fx.Node, Any] = {}
        self._values: dict[fx.Node, Any] = {}  # of nodes that no input reaches
        self._coords: dict[fx.Node, str] = {}  # coordinates (as computed first) to their name
        self._taken: set[str] = set()

    # Names and values

    def _name(self, node: fx.Node) -> str:
        """Its module's path where the module is this operation alone, else the operator's name."""
        path, kinds = self.graph.path(node), self.graph.module(node).children()
        alone = path if all(isinstance(child, TensorQuantizer) for child in kinds) else ""
        stem = alone or called_name(node).rpartition(":")[2]
        return self._unique(stem.replace(".", "_"))

    def _unique(self, stem: str) -> str:
        name, count = stem, 0
        while name in self._taken:
            count += 1
            name = f"{stem}_{count}"
        self._taken.add(name)
        return name

    def _inputs(self) -> None:
        self._leaves: list[Any] = []
        names: dict[str, str] = {}
        for node, path in zip(self.graph.placeholders, self.graph.input_names, strict=True):
            name = self._unique(path.removesuffix(".features"))
            self._leaves.append(Ref(name))
            names[path] = name
            self._refs[node] = Ref(name)
            if path.endswith(".features"):
                coords = f"{name}.sites"
                self.sparse_inputs[name] = coords
                self._hosts.add(coords)
            if path.endswith((".indices", ".batch_size")) and self.sparse_inputs:
                # A sparse input is one argument: what it consists of is read from its coordinates.
                owner = path.rpartition(".")[0]
                if f"{owner}.sites" in self._hosts:
                    names[path] = f"{owner}.sites.{path.rpartition('.')[2]}"
                    self._refs[node] = self._coords_part(f"{owner}.sites", path.rpartition(".")[2])
                    if path.endswith(".indices"):
                        self._coords[node] = f"{owner}.sites"
                    continue
            if isinstance(node.meta.get("val"), Tensor):
                self._keep(node, Operation("input", path, name))
            else:
                self._hosts.add(name)
        self.guards = tuple(guard.renamed(names) for guard in self.graph.guards)
        if any(map(_keeps_grid, self.graph.operations)):
            nested(self.graph.inputs, self._leaves, self._fix_grid)

    def _fix_grid(self, tree: Any) -> None:
        """Require the example's grid, whose sizes are numbers in the graph."""
        grid = f"{self.sparse_inputs[self._leaves[tree.features.index].name]}.spatial_shape"
        sizes = [constant.value for constant in tree.spatial_shape.members]
        self.guards += tuple(Guard(f"s0 == {n}", ((grid, i),)) for i, n in enumerate(sizes))

    def _constant_value(self, value: Any) -> Any:
        """The constant of a value that depends on no input; `KeyError` for others."""
        if not isinstance(value, fx.Node):
            return value
        if value not in self._values:
            constant = self.graph.constant(value)
            if constant is not None:
                self._values[value] = constant.detach()
            elif value.op == "call_function" and value.target is not OPAQUE:
                given: Any = fx.node.map_aggregate((value.args, value.kwargs), self._constant_value)
                args, kwargs = given
                with torch.no_grad():
                    target: Any = value.target
                self._values[value] = target(*args, **kwargs)
            else:
                raise KeyError(value)
        return self._values[value]

    @cached_property
    def _constants(self) -> set[fx.Node]:
        """Nodes that no input reaches."""
        found: set[fx.Node] = set()
        for node in self.graph.graph.nodes:
            called = node.op == "call_function" and node.target is not OPAQUE
            if self.graph.constant(node) is not None or (
                called and found.issuperset(node.all_input_nodes) and not self._is_operand(node)
            ):
                found.add(node)
        return found

    def _is_operand(self, node: fx.Node) -> bool:
        """Whether a quantized constant is added to integers, and so is one of them."""
        kinds = {op_spec(user.target).kind for user in node.users}
        return "add" in kinds and isinstance(self.graph.module(node), AffineQuantizer)

    def _resolved(self, value: Any) -> Any:
        """Arguments with `Ref`s in the place of nodes."""
        return fx.node.map_aggregate(value, self._ref)

    def _ref(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if value not in self._refs:
            self._refs[value] = (
                self._coords_part(self._coords_at(value, None, None), "indices")
                if is_coords(value)
                else self._constant(value)
            )
        return self._refs[value]

    def _constant(self, node: fx.Node) -> Any:
        tensor = self._constant_value(node)
        if not isinstance(tensor, Tensor):
            return tensor
        path = self.graph.constant_path(node) or self.graph.path(node)
        name = self._unique((path or node.name).replace(".", "_"))
        # As a file holds it: in which order a convolution adds up hangs on how its weight lies.
        kept = tensor.detach().contiguous()
        return self._keep(node, Operation("constant", path, name, tensor=kept))

    def _keep(self, node: fx.Node, operation: Operation) -> Ref:
        self.operations.append(operation)
        self.natural[operation.output] = operation.natural
        self._made[operation.output] = operation
        self.nodes[operation.output] = node
        return Ref(operation.output)

    def _tensor(self, node: fx.Node, kind: str, output: str = "", **settings: Any) -> Ref:
        settings.setdefault("path", self.graph.path(node))
        output = output or self._name(node)
        return self._keep(node, Operation(kind=kind, output=output, **settings))

    def _is_tensor(self, value: Any) -> bool:
        return isinstance(value, Ref) and value.name not in self._hosts

    def _host(self, node: fx.Node, what: str, args: Any, function: Callable[..., Any]) -> Ref:
        name = self._unique(node.name)
        self._hosts.add(name)
        self.operations.append(
            Operation("number", self.graph.path(node), name, args, {}, function, what)
        )
        return Ref(name)

    def _float(self, node: fx.Node, args: Any, kwargs: Any, reason: str, **settings: Any) -> Ref:
        return self._tensor(node, "float", args=args, kwargs=kwargs, reason=reason, **settings)

    # Sparse tensors

    def _first(self, node: Any) -> Any:
        """The node that coordinates come from, copies and changes of type passed over."""
        while isinstance(node, fx.Node) and node.op == "call_function":
            spec = op_spec(node.target)
            held = spec.casts and node.meta["val"].dtype in COORD_TYPES
            if not held and spec.kind != "identity":
                break
            node = node.args[0]
        return node

    def _coords_part(self, coords: str, part: str) -> Ref:
        name = self._unique(f"{coords}.{part}")
        self._hosts.add(name)
        self.operations.append(
            Operation("number", "", name, (Ref(coords), part), {}, getattr, "getattr")
        )
        return Ref(name)

    def _coords_at(self, indices: Any, shape: Any, batch_size: Any) -> str:
        """Name of these coordinates; made here if they come as a plain tensor."""
        first = self._first(indices)
        if first not in self._coords:
            if is_coords(first):
                return self._coords_behind(first.args[0])
            if op_spec(first.target).kind == "rulebook":
                return self._coords_behind(first)
            coords = self._unique(f"{first.name}.sites")
            self._hosts.add(coords)
            args = (self._ref(indices), self._resolved(list(shape)), self._ref(batch_size))
            self.operations.append(Operation("coordinates", "", coords, args=args))
            self._coords[first] = coords
        return self._coords[first]

    def _coords_behind(self, rulebook: Any) -> str:
        """Coordinates that a strided rulebook makes, where no convolution has made them yet."""
        indices, shape, batch_size = rulebook.args[:3]
        before = self._coords_at(indices, shape, batch_size)
        out = _coords_of(rulebook)
        coords = self._unique(f"{out.name}.sites")
        self._hosts.add(coords)
        args = (Ref(before), self._key(rulebook), *_geometry_of(rulebook).numbers())
        self.operations.append(
            Operation("number", "", coords, args, {}, convolved_coords, "convolved_coords")
        )
        self._coords[out] = coords
        return coords

    def _key(self, node: fx.Node) -> str | None:
        key = getattr(self.graph.module(node), "indice_key", None)
        return None if key is None else str(key)

    def _walk(self, neighbours: Any) -> tuple[Geometry, str, Any]:
        """Geometry of a table of neighbours, the coordinates that it reads and makes."""
        if neighbours.target is operator.getitem:
            rulebook = neighbours.args[0]
            indices, shape, batch_size = rulebook.args[:3]
            coords = self._coords_at(indices, shape, batch_size)
            return _geometry_of(rulebook), coords, _coords_of(rulebook)
        name = op_spec(neighbours.target).name.rpartition(":")[2]
        if name == "inverse_rulebook":
            forward = neighbours.args[0].args[0]
            geometry = replace(_geometry_of(forward), inverse=True, transposed=False)
            coords = self._coords[_coords_of(forward)]
            return geometry, coords, self._first(neighbours.args[1])
        indices, shape, batch_size = neighbours.args[:3]
        geometry = _geometry_of(neighbours)
        return geometry, self._coords_at(indices, shape, batch_size), self._first(indices)

    # What is returned

    def _sparse_output(self, tree: Any) -> SparseRef:
        """A sparse tensor among the results, by features and coordinates."""
        features, indices, shape, batch_size = (
            nested(getattr(tree, part), self.graph.outputs, self._sparse_output)
            for part in ("features", "indices", "spatial_shape", "batch_size")
        )
        return SparseRef(self._ref(features).name, self._coords_at(indices, shape, batch_size))


def _keeps_grid(node: fx.Node) -> bool:
    """Whether an operator may hold a size of the grid as a number: sparse ones read their input's.

    Functions of single features hold none either.
    """
    spec = op_spec(node.target)
    return not (spec.unary or spec.kind in _ON_VOXELS or node.target is operator.getitem)


def is_coords(node: fx.Node) -> bool:
    """Whether a node is part of a strided rulebook's result."""
    source = node.args[0] if node.target is operator.getitem else None
    return (
        isinstance(source, fx.Node)
        and source.op == "call_function"
        and op_spec(source.target).kind == "rulebook"
    )


def _coords_of(rulebook: fx.Node) -> fx.Node:
    """The coordinates of a strided rulebook; without readers, the rulebook itself."""
    parts = (u for u in rulebook.users if u.target is operator.getitem and u.args[1] == 0)
    return next(parts, rulebook)


def _geometry_of(rulebook: fx.Node) -> Geometry:
    name = op_spec(rulebook.target).name.rpartition(":")[2]
    args: Any = rulebook.args
    if name == "identity_rulebook":
        rank = args[0].meta["val"].shape[1] - 1
        ones, zeros = (1,) * rank, (0,) * rank
        return Geometry(ones, ones, zeros, ones, zeros, True, False, False)
    if name == "subm_rulebook":
        size, dilation = tuple(args[3]), tuple(args[4])
        ones, zeros = (1,) * len(size), (0,) * len(size)
        return Geometry(size, ones, zeros, dilation, zeros, True, False, False)
    size, stride, padding, dilation, more = (tuple(a) for a in args[3:8])
    return Geometry(size, stride, padding, dilation, more, False, bool(args[8]), False)


def nested(tree: Any, leaves: Sequence[Any], sparse: Callable[[Any], Any]) -> Any:
    """The result as dicts, lists and tuples of references."""
    if hasattr(tree, "features"):
        return sparse(tree)
    if hasattr(tree, "members"):
        members = [nested(member, leaves, sparse) for member in tree.members]
        if tree.keys is not None:
            return dict(zip(tree.keys, members, strict=True))
        if hasattr(tree.kind, "_fields"):
            return tree.kind(*members)
        return tuple(members) if issubclass(tree.kind, tuple) else members
    return leaves[tree.index] if hasattr(tree, "index") else tree.value
