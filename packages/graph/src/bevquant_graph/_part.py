"""A part of a captured graph, between some of its values, as a graph of its own."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from ._graph import Graph
from ._opaque import OPAQUE
from ._read_members import ReadMembers
from ._signature import Constant, Leaf, Nested, Sparse, Tree

_SIZE = torch.ops.aten.sym_size.int


def named_results(graph: Graph) -> dict[str, Tree]:
    """Results of a graph, by keys and positions; sparse tensors whole.

    Numbers and constants are left out. A single result has the name "".

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bevquant_graph import capture
        >>> class Head(nn.Module):
        ...     def forward(self, x):
        ...         return [{"reg": x + 1, "height": x + 2}]
        >>> list(named_results(capture(Head(), torch.ones(1))))
        ['0_reg', '0_height']
    """
    return dict(_named(graph, graph.result, ""))


def _named(graph: Graph, tree: Tree, name: str) -> Iterator[tuple[str, Tree]]:
    if isinstance(tree, Sparse):
        yield name, tree
    elif isinstance(tree, Leaf):
        made = graph.outputs[tree.index]
        if isinstance(made, fx.Node) and isinstance(made.meta.get("val"), Tensor):
            yield name, tree
    elif isinstance(tree, Nested):
        keys = range(len(tree.members)) if tree.keys is None else tree.keys
        for key, member in zip(keys, tree.members, strict=True):
            yield from _named(graph, member, f"{name}_{key}".lstrip("_"))


def nodes_behind(
    graph: Graph, values: Iterable[fx.Node], given: Collection[fx.Node] = ()
) -> list[fx.Node]:
    """Nodes that values depend on, themselves included, in order, up to `given`.

    A number that is a size of a given value is known there.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bevquant_graph import capture
        >>> graph = capture(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), torch.ones(3, 4))
        >>> linear, relu = graph.operations
        >>> nodes_behind(graph, [relu], [linear])
        [linear, relu]
    """
    sizes = _sizes(given)
    found: set[fx.Node] = set()
    pending = list(values)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            # Sizes of given tensors are read from the tensors.
            pending += () if node in given or _number(node) in sizes else node.all_input_nodes
    return [node for node in graph.graph.nodes if node in found]


def part_of(
    graph: Graph, results: Mapping[str, Tree | fx.Node], given: Mapping[str, fx.Node] | None = None
) -> Graph:
    """The graph that computes `results` from `given`.

    A number that is a size of a given value is read from it. Requirements of the whole graph on
    numbers taken from tensors are not repeated.

    Args:
        graph: The whole.
        results: Name to a node, or to a part of ``graph.result``. The new graph returns a dict of
            these; the value itself where its one name is "".
        given: Name to the node that is an input of that name. None: the inputs of the whole.

    Raises:
        ValueError: A result depends on an input that is not given; the message names it.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bevquant_graph import capture
        >>> whole = capture(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), torch.ones(3, 4))
        >>> linear, relu = whole.operations
        >>> part_of(whole, {"y": relu}, {"x": linear}).replay(x=torch.tensor([[-1.0, 2.0]]))
        {'y': tensor([[0., 2.]])}
    """
    return _Part(graph, given).made(results)


class _Part:
    def __init__(self, whole: Graph, given: Mapping[str, fx.Node] | None) -> None:
        self.whole, self.given = whole, given
        self.sizes = {} if given is None else _sizes(given.values())
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.inputs: list[fx.Node] = []

    def made(self, results: Mapping[str, Tree | fx.Node]) -> Graph:
        outputs: list[Any] = []
        trees = {name: self._result(value, outputs) for name, value in results.items()}
        tree = trees[""] if [*trees] == [""] else _dict(trees)
        ends = self.whole.placeholders if self.given is None else list(self.given.values())
        values = [value for value in outputs if isinstance(value, fx.Node)]
        needed = nodes_behind(self.whole, values, [] if self.given is None else ends)
        needed = [node for node in needed if node not in ends]
        constants = [n for n in needed if self.whole.constant_path(n) is not None]
        signature: Any = self.whole.program.graph_signature
        known = {spec.arg.name: spec for spec in signature.input_specs}
        # As in torch.export: parameters and buffers before inputs.
        for node in constants:
            self.copies[node] = self.graph.node_copy(node)
        inputs = self._inputs()
        for node in needed:
            if node not in self.copies:
                self.copies[node] = self._copied(node)
        made = [self.copies[value] if isinstance(value, fx.Node) else value for value in outputs]
        self.graph.output(tuple(made))
        program: Any = copy.copy(self.whole.program)
        program._graph_module = fx.GraphModule(torch.nn.Module(), self.graph)
        program._graph_signature = ExportGraphSignature(
            [known[node.name] for node in constants]
            + [_spec(InputSpec, InputKind.USER_INPUT, node) for node in self.inputs],
            [_spec(OutputSpec, OutputKind.USER_OUTPUT, value) for value in made],
        )
        calls = {n.args[1] for n in needed if n.target is OPAQUE}
        opaque = {
            path: entry
            for path, entry in self.whole.opaque.items()
            if any(call.key in calls for call in entry.calls)
        }
        asked = {} if self.given is not None else self.whole.members.asked
        return Graph(
            self.whole.model, program, inputs, tree, opaque, self.whole.conditions,
            members=ReadMembers(asked),
        )  # fmt: skip

    def _result(self, value: Tree | fx.Node, outputs: list[Any]) -> Tree:
        """A result with its leaves counted anew."""
        if isinstance(value, fx.Node):
            outputs.append(value)
            return Leaf(len(outputs) - 1)
        if isinstance(value, Leaf):
            outputs.append(self.whole.outputs[value.index])
            return Leaf(len(outputs) - 1)
        if isinstance(value, Nested):
            members = tuple(self._result(member, outputs) for member in value.members)
            return Nested(value.kind, value.keys, members)
        if isinstance(value, Sparse):
            parts = (value.features, value.indices, value.spatial_shape, value.batch_size)
            return Sparse(value.kind, *(self._result(part, outputs) for part in parts))
        return Constant(value.value)

    def _inputs(self) -> Tree:
        """Placeholders of the part, and how a call gives them."""
        given = dict(zip(self.whole.input_names, self.whole.placeholders, strict=True))
        given = given if self.given is None else dict(self.given)
        for name, node in given.items():
            own = self.graph.placeholder(node.name if self.given is None else name)
            own.meta = {key: node.meta[key] for key in ("val",) if key in node.meta}
            self.copies[node] = own
            self.inputs.append(own)
        if self.given is None:
            return self.whole.inputs
        return Nested(tuple, None, (
            Nested(tuple, None, ()),
            _dict({name: Leaf(index) for index, name in enumerate(given)}),
        ))  # fmt: skip

    def _copied(self, node: fx.Node) -> fx.Node:
        """Copy of a node of the whole graph; a size of an input is read from the input."""
        if _number(node) in self.sizes:
            source, axis = self.sizes[_number(node)]
            made = self.graph.call_function(_SIZE, (self.copies[source], axis))
            made.meta = dict(node.meta)
            return made
        if node in self.whole.placeholders:
            name = self.whole.input_names[self.whole.placeholders.index(node)]
            raise ValueError(f"part_of: the part reads the input {name}, which is not given")
        return self.graph.node_copy(node, self.copies.__getitem__)


def _sizes(given: Iterable[fx.Node]) -> dict[str, tuple[fx.Node, int]]:
    """Open sizes of tensors, to where they are found."""
    found: dict[str, tuple[fx.Node, int]] = {}
    for node in given:
        value = node.meta.get("val")
        for axis, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if _open(size):
                found.setdefault(_open(size), (node, axis))
    return found


def _open(size: Any) -> str:
    """The expression of an open number; "" of everything else."""
    return str(size.node.expr) if isinstance(size, SymInt) else ""


def _number(node: fx.Node) -> str:
    return _open(node.meta.get("val"))


def _dict(members: Mapping[str, Tree]) -> Nested:
    return Nested(dict, tuple(members), tuple(members.values()))


def _spec(kind: Any, what: Any, value: Any) -> Any:
    return kind(what, TensorArgument(getattr(value, "name", str(value))), None)
