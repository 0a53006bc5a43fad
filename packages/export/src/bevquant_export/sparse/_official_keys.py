"""Rulebook keys as the engine wants them: ``subm1`` at the first submanifold convolution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from bevquant_export.sparse._graph import Conv, Graph, Node

__all__ = ["official_keys"]

_FIRST = "subm1"


def official_keys(graph: Graph) -> Graph:
    """`graph` with the key ``subm1`` at a submanifold convolution that reads the input.

    Whatever else had that key gets one that nothing has; what shared pairs still does. A first
    convolution without a key takes ``subm1`` alone, so that the engine builds its pairs once more
    than it must and never wrong ones.
    """
    first = next((n for n in graph.nodes if isinstance(n, Conv) and n.x == graph.input), None)
    if first is None or not first.subm or first.rulebook == _FIRST:
        return graph
    used = {node.rulebook for node in graph.nodes if isinstance(node, Conv)}
    renamed = {_FIRST: next(key for key in _other_keys() if key not in used)}
    if first.rulebook:
        renamed[first.rulebook] = _FIRST

    def keyed(node: Node) -> Node:
        if not isinstance(node, Conv):
            return node
        key = _FIRST if node is first else renamed.get(node.rulebook, node.rulebook)
        return replace(node, rulebook=key)

    return replace(graph, nodes=tuple(keyed(node) for node in graph.nodes))


def _other_keys() -> Iterator[str]:
    return (f"{_FIRST}_{number}" for number in count(2))
