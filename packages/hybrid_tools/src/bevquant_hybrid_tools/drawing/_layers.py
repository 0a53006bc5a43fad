"""Layout of a graph: layers, order within layers, places along them, columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import inf
from statistics import fmean

_ASPECT = 1.25  # width over height that a screen shows well
_MOST_CUT = 3  # edges that one break between columns may cut
_CUT = 0.15  # badness of one more
_SWEEPS = 12
_PULLS = 17  # odd, so that the last one goes down

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class DrawnNode:
    """One node of the picture."""

    name: str  # unique; the module's path or the graph node's name
    operator: str = ""  # the operator; the second line
    place: str = ""  # "BPU", "CPU", or "" for inputs, outputs and boundaries
    inputs: tuple[str, ...] = ()  # names of its producers
    boundary: str = ""  # "quantize" or "dequantize" for a boundary
    detail: str = ""  # a few words more on the second line, such as a shape
    note: str = ""  # tooltip of the node: the reason of its placement
    floats: bool = False  # whether its result is floats although it runs on the BPU

    def __post_init__(self) -> None:
        """Refuse unknown places and boundaries."""
        if not self.name:
            raise ValueError("a node without a name cannot be drawn")
        for what, known in (
            ("place", ("BPU", "CPU", "")),
            ("boundary", ("quantize", "dequantize", "")),
        ):
            found = getattr(self, what)
            if found not in known:
                raise ValueError(f"{self.name}: {what} {found!r}; expected one of {known}")


def in_order(nodes: Sequence[DrawnNode]) -> list[DrawnNode]:
    """The nodes in topological order, otherwise in the given order."""
    names: set[str] = set()
    for node in nodes:
        if node.name in names:
            raise ValueError(f"two nodes are called {node.name!r}; names must be unique")
        names.add(node.name)
    for node in nodes:
        for source in node.inputs:
            if source not in names:
                raise ValueError(f"{node.name} reads {source!r}, which is no node of the picture")
    ordered: dict[str, DrawnNode] = {}
    waiting = list(nodes)
    while waiting:
        for node in waiting:
            if all(source in ordered for source in node.inputs):
                ordered[node.name] = node
        left = [node for node in waiting if node.name not in ordered]
        if len(left) == len(waiting):
            circle = ", ".join(node.name for node in waiting[:5])
            raise ValueError(f"nodes read one another in a circle: {circle}")
        waiting = left
    return list(ordered.values())


@dataclass(frozen=True)
class Layering:
    """Layers from top to bottom."""

    # Names in each layer, from left to right. "a>b@2" is the place where the edge from a to b
    # passes through layer 2
    layers: list[list[str]]
    # For each edge the names it runs through, from its producer to its consumer
    edges: dict[tuple[str, str], list[str]]
    neighbours: list[Pairs]  # edges between a layer and the next, as pairs of names


def layer_nodes(nodes: Sequence[DrawnNode]) -> Layering:
    """Longest-path layers, then barycentre sweeps."""
    depth = _depths(nodes)
    count = 1 + max(depth.values(), default=-1)
    layers: list[list[str]] = [[] for _ in range(count)]
    for node in nodes:
        layers[depth[node.name]].append(node.name)
    edges: dict[tuple[str, str], list[str]] = {}
    neighbours: list[Pairs] = [[] for _ in range(max(0, count - 1))]
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
    # What reads nothing stands right above its first reader.
    for node in nodes:
        if not node.inputs and node.name in readers:
            depth[node.name] = min(depth[reader] for reader in readers[node.name]) - 1
    return depth


def _levels(count: int, sweep: int) -> Iterator[tuple[int, int]]:
    """Each layer and the one that it is moved towards: down in even sweeps, up in odd ones."""
    if sweep % 2:
        return ((level, level + 1) for level in range(count - 2, -1, -1))
    return ((level, level - 1) for level in range(1, count))


def _ties(neighbours: Sequence[Pairs], level: int, fixed: int) -> dict[str, list[str]]:
    """Names of a layer, with their neighbours in the layer above or below."""
    found: dict[str, list[str]] = {}
    for pair in neighbours[min(level, fixed)]:
        mine, other = pair if level < fixed else pair[::-1]
        found.setdefault(mine, []).append(other)
    return found


def _order(layers: list[list[str]], neighbours: Sequence[Pairs]) -> list[list[str]]:
    """The best of several sweeps, which order each layer by the mean place of its neighbours."""
    best, least = layers, _crossings(layers, neighbours)
    current = [list(layer) for layer in layers]
    for sweep in range(_SWEEPS if least else 0):
        for level, fixed in _levels(len(layers), sweep):
            place = {name: i for i, name in enumerate(current[fixed])}
            ties = _ties(neighbours, level, fixed)
            means = {name: fmean(place[other] for other in ties[name]) for name in ties}
            moving = iter(sorted((n for n in current[level] if n in means), key=means.__getitem__))
            current[level] = [next(moving) if n in means else n for n in current[level]]
        crossings = _crossings(current, neighbours)
        if crossings < least:
            best, least = [list(layer) for layer in current], crossings
    return best


def _crossings(layers: Sequence[Sequence[str]], neighbours: Sequence[Pairs]) -> int:
    """How many pairs of edges cross between neighbouring layers."""
    total = 0
    for two, pairs in zip(pairwise(layers), neighbours, strict=True):
        upper, lower = ({name: i for i, name in enumerate(layer)} for layer in two)
        ends = sorted((upper[a], lower[b]) for a, b in pairs)
        total += sum(a[0] < b[0] and a[1] > b[1] for a, b in combinations(ends, 2))
    return total


def break_columns(
    cut_edges: Sequence[int], width_of: Callable[[range], float], pitch: float, *, gutter: float
) -> list[range]:
    """Choose the layers of each column, top to bottom."""
    best: list[range] = []
    least = inf
    for columns in range(1, 9):
        parts = _split(cut_edges, columns)
        if parts is None:
            break
        width = sum(width_of(part) + gutter for part in parts) - gutter
        ratio = width / (max(map(len, parts)) * pitch) / _ASPECT
        badness = max(ratio, 1 / ratio)  # twice as tall is as bad as twice as wide
        badness += _CUT * sum(cut_edges[part.start - 1] - 1 for part in parts[1:])
        if badness < least:
            best, least = parts, badness
    return best


def _split(cut_edges: Sequence[int], columns: int) -> list[range] | None:
    """Columns of nearly equal height, each break moved to where it cuts fewest edges."""
    count = len(cut_edges) + 1
    if columns > 1 and count < 6 * columns:
        return None
    ends = [0]
    for column in range(1, columns):
        ideal = round(count * column / columns)
        near = range(ideal - 3, ideal + 4)
        ends.append(min(near, key=lambda i: (cut_edges[i - 1], abs(i - ideal))))
    if any(cut_edges[end - 1] > _MOST_CUT for end in ends[1:]):
        return None
    return [range(a, b) for a, b in pairwise([*ends, count])]


def place_layers(
    layering: Layering, widths: Mapping[str, float], weights: Mapping[str, float], gap: float
) -> dict[str, float]:
    """Centres of all nodes, at least `gap` apart in a layer.

    Sweeps down and up move each layer towards its neighbours, as far as widths and gap allow. Heavy
    nodes have priority over light ones: the main path of a model becomes a straight line, and its
    shortcuts bend around it.
    """
    centres: dict[str, float] = {}

    def place(layer: Sequence[str], wanted: Sequence[float]) -> None:
        own = [[of[name] for name in layer] for of in (widths, weights)]
        centres.update(zip(layer, place_layer(wanted, own[0], gap, weights=own[1]), strict=True))

    for layer in layering.layers:
        place(layer, [0.0] * len(layer))
    for sweep in range(_PULLS):
        for level, fixed in _levels(len(layering.layers), sweep):
            ties, layer = _ties(layering.neighbours, level, fixed), layering.layers[level]
            pulls = [[(centres[o], weights[o]) for o in ties.get(n, (n,))] for n in layer]
            place(layer, [_middle(of) for of in pulls])
    return centres


def _middle(pulls: Sequence[tuple[float, float]]) -> float:
    """The weighted median of places: between two that pull equally, their mean."""
    ordered = sorted(pulls)
    half = sum(weight for _, weight in ordered) / 2
    seen = 0.0
    for (place, weight), (after, _) in pairwise([*ordered, ordered[-1]]):
        seen += weight
        if abs(seen - half) < 1e-6 * half:
            return (place + after) / 2
        if seen > half:
            return place
    return ordered[-1][0]


def place_layer(
    wanted: Sequence[float],
    widths: Sequence[float],
    gap: float,
    *,
    weights: Sequence[float] | None = None,
) -> list[float]:
    """Centres nearest to ``wanted`` in the sense of least squares, in order and ``gap`` apart.

    With the room that the earlier ones take subtracted, the condition is that places do not
    decrease: pools of neighbours that want to overlap share the weighted mean of their wishes.

    Example:
        >>> place_layer([0.0, 0.0], [10.0, 10.0], 2.0)
        [-6.0, 6.0]
    """
    room = [0.0]
    for first, second in pairwise(widths):
        room.append(room[-1] + (first + second) / 2 + gap)
    pools: list[tuple[float, float, int]] = []  # weighted wishes, weight, how many
    for i, wish in enumerate(wanted):
        weight = weights[i] if weights else 1.0
        pool = ((wish - room[i]) * weight, weight, 1)
        while pools and pools[-1][0] / pools[-1][1] > pool[0] / pool[1]:
            last = pools.pop()
            pool = (pool[0] + last[0], pool[1] + last[1], pool[2] + last[2])
        pools.append(pool)
    places = [total / weight for total, weight, count in pools for _ in range(count)]
    return [place + taken for place, taken in zip(places, room, strict=False)]


def straighten(
    centres: dict[str, float],
    layering: Layering,
    passing: Iterable[Sequence[str]],
    widths: Mapping[str, float],
    gap: float,
) -> None:
    """Put the places that a long edge passes through on one line, where there is room for it."""
    beside = {
        name: (left, right)
        for layer in layering.layers
        for left, name, right in zip(["", *layer], layer, [*layer[1:], ""], strict=False)
    }
    for names in passing:
        low, high = -inf, inf
        for name in names:
            (left, right), own = beside[name], centres[name]
            half = widths[name] / 2 + gap
            if left:
                low = max(low, min(own, centres[left] + widths[left] / 2 + half))
            if right:
                high = min(high, max(own, centres[right] - widths[right] / 2 - half))
        if low <= high:
            mean = fmean(centres[name] for name in names)
            centres.update(dict.fromkeys(names, min(max(mean, low), high)))
