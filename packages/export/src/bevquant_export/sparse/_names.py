"""Names of nodes and tensors as in NVIDIA's exporter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bevquant_export.sparse._graph import Graph, Node


def numbered(graph: Graph, outputs: Mapping[str, str] | None = None) -> Graph:
    """Tensors "0", "1", … in order of execution; nodes ``conv0``, ``add0``, ``relu0`` and so on.

    `outputs` has other names, for tensors that the file returns.
    """
    names = {graph.input: "0"}
    counts: Counter[str] = Counter()
    nodes: list[Node] = []
    for node in graph.nodes:
        names[node.y] = (outputs or {}).get(node.y, str(len(names)))
        nodes.append(_renamed(node, names, f"{node.kind}{counts[node.kind]}"))
        counts[node.kind] += 1
    return replace(
        graph,
        input="0",
        nodes=tuple(nodes),
        outputs=tuple(names[name] for name in graph.outputs),
        shapes={names[name]: shape for name, shape in graph.shapes.items()},
    )


def _renamed(node: Node, names: Mapping[str, str], name: str) -> Node:
    """The node with another name, its tensors with those in `names`."""
    read: dict[str, Any] = {}
    for field in ("x", "other", "xs", "places"):
        held = getattr(node, field, None)
        if held is not None:
            read[field] = names[held] if isinstance(held, str) else tuple(names[x] for x in held)
    return replace(node, y=names[node.y], name=name, **read)
