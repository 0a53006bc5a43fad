"""Choices by value (top-k, sort, arg-max, non-zero, masks), and the rows that they decide.

Float and integers order equal scores differently, so rows behind a choice are of other objects. A
comparison gives the integer model's choice to the float models, counts the objects that these would
have chosen too, and compares the rows of the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from bevquant_graph import OPAQUE, OpSpec, op_spec
from bevquant_qnn import matched
from bevquant_qnn.matched import Matched

_WEIGHTED = frozenset(("layer", "sparse_layer"))
_LEARNED = _WEIGHTED | {"quantize"}


class Choices:
    """The choices of a graph.

    Args:
        graph: The graph.

    Attributes:
        counted: Nodes that choose: indices, places, masks that select rows, and opaque modules.
            They depend on a layer or a quantizer; other choices are the same in all runs.
        nodes: These, and the comparisons between the last layer and a choice, as those of a
            suppression by `max_pool`.
        upstream: For each node downstream of one of `nodes`, all choices upstream.
    """

    def __init__(self, graph: fx.Graph) -> None:
        learned = _downstream(graph, lambda node: op_spec(node.target).kind in _LEARNED)
        chosen = (n for node in graph.nodes for n in _chosen_by(node))
        self.counted = dict.fromkeys(node for node in chosen if node in learned)
        leading, seen = _comparisons(self.counted)
        self.nodes = {*self.counted, *leading}
        # Of comparisons and up to the choice, the float model's own values are computed, to count.
        self.own = seen & _downstream(graph, leading.__contains__)
        self.upstream: dict[fx.Node, tuple[fx.Node, ...]] = {}
        for node in graph.nodes:
            inputs = node.all_input_nodes
            found = dict.fromkeys(c for n in inputs for c in self.upstream.get(n, ()))
            found |= dict.fromkeys(n for n in inputs if n in self.counted)
            if found or any(n in leading or n in self.upstream for n in inputs):
                self.upstream[node] = tuple(found)

    def given(self, node: fx.Node, values: dict[fx.Node, Any], chosen: Any) -> Any:
        """Result of a node of `nodes` with the integer model's choice, in a float run.

        `values` are those of the run, the node's own included.
        """
        own = values[node]
        if _spec(node).chooses == "ranks" and not isinstance(own, Tensor):
            operand: Any = node.args[0]
            index, axis = chosen[1], _axis(node)
            x = values[operand]
            if index.dim() == x.dim():
                return x.take_along_dim(index, axis), index
            return x.take_along_dim(index.unsqueeze(axis), axis).squeeze(axis), index
        if node in self.counted or own.shape == chosen.shape:
            return chosen
        return own

    def matched(self, node: fx.Node, own: Any, chosen: Any) -> Matched:
        """Counts of a node of `counted`: the float model's own choice and the integer model's."""
        chooses = _spec(node).chooses
        if chooses == "places":
            one, other = (
                v if isinstance(v, Tensor) else torch.stack([*v], -1) for v in (own, chosen)
            )
            return matched.places(one, other)
        if chooses not in ("ranks", "indices"):
            return matched.masks(own, chosen)
        one, other = (v if isinstance(v, Tensor) else v[1] for v in (own, chosen))
        axis = _axis(node)
        operand: Any = node.args[0]
        if axis is None or one.dim() < len(operand.meta["val"].shape):
            return matched.values(one, other)
        for part in _parts(node):  # x.argsort()[:, :k]: the first ones alone are chosen
            one, other = (part.target(v, *part.args[1:]) for v in (one, other))  # type: ignore[operator]
        return matched.lines(one, other, axis)


def _downstream(graph: fx.Graph, begins: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Nodes for which `begins` holds, and all nodes that depend on them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        called = node.op == "call_function"
        if called and (begins(node) or not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _spec(node: fx.Node) -> OpSpec:
    return op_spec(node.target if node.op == "call_function" else "")


def _chosen_by(node: fx.Node) -> Iterator[fx.Node]:
    """The node, if it chooses; the masks that it reads rows by."""
    spec = _spec(node)
    if (
        node.target is OPAQUE
        or spec.chooses == "indices"
        or (spec.chooses == "places" and (spec.name != "where" or len(node.args) == 1))
    ):
        yield node
    elif spec.chooses == "ranks" and not isinstance(node.meta.get("val"), Tensor):
        if any(user.args[1] == 1 and user.users for user in node.users):  # not of values alone
            yield node
    elif spec.chooses == "rows":
        masks: list[Any] = []
        fx.node.map_arg(node.args[1], masks.append)
        yield from (mask for mask in masks if _is_mask(mask))


def _is_mask(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _comparisons(counted: dict[fx.Node, None]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Comparisons that lead to a choice without a layer between; all nodes that do."""
    seen: set[fx.Node] = set()
    pending = list(counted)
    while pending:
        node = pending.pop()
        if node not in seen and node.op == "call_function":
            seen.add(node)
            if op_spec(node.target).kind not in _WEIGHTED:
                pending += node.all_input_nodes
    found = {node for node in seen if _spec(node).compares and _is_mask(node)}
    return found - counted.keys(), seen


def _axis(node: fx.Node) -> int | None:
    arguments: Any = node.target._schema.arguments  # type: ignore[union-attr]
    for place, argument in enumerate(arguments):
        if argument.name == "dim":
            given: Any = node.args[place] if place < len(node.args) else None
            given = node.kwargs.get("dim", argument.default_value if given is None else given)
            return None if given is None else int(given)
    return None


def _parts(node: fx.Node) -> list[fx.Node]:
    """Slices by numbers that stand between indices and all of their readers."""
    indices = [node]
    if not isinstance(node.meta.get("val"), Tensor):
        indices = [user for user in node.users if user.args[1] == 1]
    found: list[fx.Node] = []
    while True:
        cuts = [user for one in indices for user in one.users]
        numbers = all(_spec(c).name == "slice" and len(c.all_input_nodes) == 1 for c in cuts)
        if not numbers or len({c.args[1:] for c in cuts}) != 1:
            return found
        found.append(cuts[0])
        indices = cuts
