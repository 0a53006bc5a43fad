"""Which nodes of a graph are numbers (sizes and what is computed of them), not tensors."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, Node

__all__ = ["number_nodes"]

_METHODS = {"size", "dim", "numel", "nelement", "ndimension", "__len__", "stride", "item"}
_FACTS = {"shape", "ndim", "device", "dtype"}
_ARITHMETIC = {
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv),
    *(operator.mod, operator.neg, operator.getitem, operator.pow, int, float, len, max, min),
}


def number_nodes(graph: Graph) -> set[Node]:
    """Return the nodes that hold numbers, tuples of them, or facts about tensors."""
    found: set[Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        of_numbers = bool(inputs) and all(i in found for i in inputs)
        if (
            (node.op == "call_method" and node.target in _METHODS)
            or (node.op == "call_function" and node.target is getattr and _fact(node))
            or (node.op == "call_function" and node.target in _ARITHMETIC and of_numbers)
            or (node.op == "call_function" and node.target is len)
        ):
            found.add(node)
    return found


def _fact(node: Node) -> Any:
    return node.args[1] in _FACTS
