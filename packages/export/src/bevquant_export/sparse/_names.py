"""Names of nodes and tensors as NVIDIA's exporter gives them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from bevquant_export.sparse._graph import Add, Conv, Graph, Move, Node, Relu

__all__ = ["numbered"]


def numbered(graph: Graph) -> Graph:
    """Tensors "0", "1", … in order of execution; nodes ``conv0``, ``add0``, ``relu0`` and so on."""
    names = {graph.input: "0"}
    counts: Counter[str] = Counter()
    nodes: list[Node] = []
    for node in graph.nodes:
        kind = _kind(node)
        names[node.y] = str(len(names))
        renamed = replace(node, x=names[node.x], y=names[node.y], name=f"{kind}{counts[kind]}")
        if isinstance(renamed, Add):
            renamed = replace(renamed, other=names[renamed.other])
        counts[kind] += 1
        nodes.append(renamed)
    return Graph(
        input="0",
        channels=graph.channels,
        nodes=tuple(nodes),
        outputs=tuple(names[name] for name in graph.outputs),
        shapes={names[name]: shape for name, shape in graph.shapes.items()},
    )


def _kind(node: Node) -> str:
    if isinstance(node, Move):
        return node.op.lower()
    return {Conv: "conv", Add: "add", Relu: "relu"}.get(type(node), "scatter")
