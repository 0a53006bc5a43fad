"""Put nodes into layers so that every edge points down, and order each layer against crossings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ._node import DrawnNode

__all__ = ["Layering", "count_crossings", "layer_nodes"]

_SWEEPS = 12


@dataclass(frozen=True)
class Layering:
    """Layers from top to bottom.

    Attributes:
        layers: Names in each layer, from left to right. ``"a>b@2"`` is the place where the edge
            from ``a`` to ``b`` passes through layer 2.
        edges: For each edge the names it runs through, from its source to its reader.
        neighbours: Edges between a layer and the next, as pairs of names.
    """

    layers: list[list[str]]
    edges: dict[tuple[str, str], list[str]]
    neighbours: list[list[tuple[str, str]]]


def layer_nodes(nodes: Sequence[DrawnNode]) -> Layering:
    """Longest-path layers, then barycentre sweeps.

    Args:
        nodes: In an order where each comes after what it reads.
    """
    depth = _depths(nodes)
    count = 1 + max(depth.values(), default=-1)
    layers: list[list[str]] = [[] for _ in range(count)]
    for node in nodes:
        layers[depth[node.name]].append(node.name)
    edges: dict[tuple[str, str], list[str]] = {}
    neighbours: list[list[tuple[str, str]]] = [[] for _ in range(max(0, count - 1))]
    for node in nodes:
        for source in dict.fromkeys(node.inputs):
            first, last = depth[source], depth[node.name]
            between = [f"{source}>{node.name}@{level}" for level in range(first + 1, last)]
            for level, name in enumerate(between, start=first + 1):
                layers[level].append(name)
            path = edges[source, node.name] = [source, *between, node.name]
            for level, pair in enumerate(pairwise(path), start=first):
                neighbours[level].append(pair)
    return Layering(_order(layers, neighbours), edges, neighbours)


def _depths(nodes: Sequence[DrawnNode]) -> dict[str, int]:
    depth: dict[str, int] = {}
    readers: dict[str, list[str]] = {}
    for node in nodes:
        depth[node.name] = 1 + max((depth[source] for source in node.inputs), default=-1)
        for source in node.inputs:
            readers.setdefault(source, []).append(node.name)
    for node in nodes:  # what reads nothing stands right above its first reader
        if not node.inputs and node.name in readers:
            depth[node.name] = min(depth[reader] for reader in readers[node.name]) - 1
    return depth


def count_crossings(
    layers: Sequence[Sequence[str]], neighbours: Sequence[list[tuple[str, str]]]
) -> int:
    """How many pairs of edges cross between neighbouring layers."""
    crossings = 0
    for level, pairs in enumerate(neighbours):
        upper = {name: i for i, name in enumerate(layers[level])}
        lower = {name: i for i, name in enumerate(layers[level + 1])}
        ends = sorted((upper[a], lower[b]) for a, b in pairs)
        crossings += sum(
            ends[i][0] < ends[j][0] and ends[i][1] > ends[j][1]
            for i in range(len(ends))
            for j in range(i + 1, len(ends))
        )
    return crossings


def _order(layers: list[list[str]], neighbours: Sequence[list[tuple[str, str]]]) -> list[list[str]]:
    """The best of several sweeps: each layer by the mean place of what it is tied to."""
    best, least = layers, count_crossings(layers, neighbours)
    current = [list(layer) for layer in layers]
    for sweep in range(_SWEEPS):
        if not least:
            break
        down = sweep % 2 == 0
        levels = range(1, len(layers)) if down else range(len(layers) - 2, -1, -1)
        for level in levels:
            fixed = current[level - 1 if down else level + 1]
            place = {name: i for i, name in enumerate(fixed)}
            ties: dict[str, list[int]] = {}
            for upper, lower in neighbours[level - 1 if down else level]:
                mine, other = (lower, upper) if down else (upper, lower)
                ties.setdefault(mine, []).append(place[other])
            current[level] = _by_barycentre(current[level], ties)
        crossings = count_crossings(current, neighbours)
        if crossings < least:
            best, least = [list(layer) for layer in current], crossings
    return best


def _by_barycentre(layer: list[str], ties: Mapping[str, list[int]]) -> list[str]:
    """Sort what is tied by its mean place; what is tied to nothing keeps its own place."""
    means = {name: sum(places) / len(places) for name, places in ties.items()}
    moving = iter(sorted((n for n in layer if n in means), key=lambda n: means[n]))
    return [next(moving) if name in means else name for name in layer]
