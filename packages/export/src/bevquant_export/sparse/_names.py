"""Names of nodes and tensors as NVIDIA's exporter gives them."""

from __future__ import annotations

from collections import Counter

from bevquant_export.sparse._graph import Graph, Node, renamed

__all__ = ["numbered"]


def numbered(graph: Graph) -> Graph:
    """Tensors "0", "1", … in order of execution; nodes ``conv0``, ``add0``, ``relu0`` and so on."""
    names = {graph.input: "0"}
    counts: Counter[str] = Counter()
    nodes: list[Node] = []
    for node in graph.nodes:
        names[node.y] = str(len(names))
        nodes.append(renamed(node, names, f"{node.kind}{counts[node.kind]}"))
        counts[node.kind] += 1
    return Graph(
        input="0",
        channels=graph.channels,
        nodes=tuple(nodes),
        outputs=tuple(names[name] for name in graph.outputs),
        shapes={names[name]: shape for name, shape in graph.shapes.items()},
    )
