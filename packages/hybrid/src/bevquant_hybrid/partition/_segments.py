"""Group nodes into segments: parts of one place that can run in one go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ._plan import PlanNode

__all__ = ["number_segments"]


def number_segments(nodes: Sequence[PlanNode]) -> tuple[PlanNode, ...]:
    """Number the segments in an order in which they can run.

    A node's stage is the number of changes of place on the way to it, at most. Nodes of one place
    and one stage that read one another are a segment: no path leaves it and comes back, since a
    way through another place leads to a later stage.
    """
    stages: dict[str, int] = {}
    places: dict[str, str] = {}
    parents: dict[str, str] = {}

    def root(name: str) -> str:
        while parents[name] != name:
            name = parents[name]
        return name

    for node in nodes:
        inner = node.kind in ("operator", "pass")
        place, stage = node.place, 0
        for source in node.inputs:
            changes = bool(places[source]) and bool(place) and places[source] != place
            stage = max(stage, stages[source] + changes)
        stages[node.name], places[node.name] = stage, place
        parents[node.name] = node.name
        for source in node.inputs if inner else ():
            if source in parents and (stages[source], places[source]) == (stage, place):
                parents[root(source)] = root(node.name)
    numbers: dict[str, int] = {}
    inner_nodes = [node for node in nodes if node.kind in ("operator", "pass")]
    for node in sorted(inner_nodes, key=lambda node: stages[node.name]):
        numbers.setdefault(root(node.name), len(numbers))
    inner_names = {node.name for node in inner_nodes}
    return tuple(
        replace(node, segment=numbers[root(node.name)]) if node.name in inner_names else node
        for node in nodes
    )
