"""Nodes and their positions: layers, order within layers, distances."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_PLACES = ("BPU", "CPU", "")
_BOUNDARIES = ("quantize", "dequantize", "")


@dataclass(frozen=True)
class DrawnNode:
    """One node of the picture.

    Attributes:
        name: Unique; the module's path or the graph node's name.
        operator: The operator; the second line.
        place: ``"BPU"``, ``"CPU"``, or ``""`` for inputs, outputs and boundaries.
        inputs: Names of its producers.
        boundary: ``"quantize"`` or ``"dequantize"`` for a boundary.
        detail: A few words more on the second line, such as a shape.
        note: Tooltip of the node: the reason of its placement.
        floats: Whether its result is floats although it runs on the BPU.
    """

    name: str
    operator: str = ""
    place: str = ""
    inputs: tuple[str, ...] = ()
    boundary: str = ""
    detail: str = ""
    note: str = ""
    floats: bool = False

    def __post_init__(self) -> None:
        """Refuse unknown places and boundaries."""
        if not self.name:
            raise ValueError("a node without a name cannot be drawn")
        if self.place not in _PLACES:
            raise ValueError(f"{self.name}: place {self.place!r}; expected one of {_PLACES}")
        if self.boundary not in _BOUNDARIES:
            raise ValueError(
                f"{self.name}: boundary {self.boundary!r}; expected one of {_BOUNDARIES}"
            )


def in_order(nodes: Sequence[DrawnNode]) -> list[DrawnNode]:
    """The nodes in topological order, otherwise in the given order.

    Raises:
        ValueError: If a name occurs twice, an input is not a node, or the graph has a cycle.
    """
    by_name: dict[str, DrawnNode] = {}
    for node in nodes:
        if node.name in by_name:
            raise ValueError(f"two nodes are called {node.name!r}; names must be unique")
        by_name[node.name] = node
    for node in nodes:
        for source in node.inputs:
            if source not in by_name:
                raise ValueError(f"{node.name} reads {source!r}, which is no node of the picture")
    ordered: list[DrawnNode] = []
    done: set[str] = set()
    waiting = list(nodes)
    while waiting:
        ready = [node for node in waiting if done.issuperset(node.inputs)]
        if not ready:
            names = ", ".join(node.name for node in waiting[:5])
            raise ValueError(f"nodes read one another in a circle: {names}")
        for node in waiting:
            if done.issuperset(node.inputs):
                ordered.append(node)
                done.add(node.name)
        waiting = [node for node in waiting if node.name not in done]
    return ordered


_SWEEPS = 12

_ASPECT = 1.25  # width over height that a screen shows well
_MOST_CROSSING = 3  # edges that one break may cut
_CUT = 0.15  # how bad it is to cut one more
_PULLS = 17  # odd, so that the last one goes down


@dataclass(frozen=True)
class Layering:
    """Layers from top to bottom.

    Attributes:
        layers: Names in each layer, from left to right. ``"a>b@2"`` is the place where the edge
            from ``a`` to ``b`` passes through layer 2.
        edges: For each edge the names it runs through, from its producer to its consumer.
        neighbours: Edges between a layer and the next, as pairs of names.
    """

    layers: list[list[str]]
    edges: dict[tuple[str, str], list[str]]
    neighbours: list[list[tuple[str, str]]]


def layer_nodes(nodes: Sequence[DrawnNode]) -> Layering:
    """Longest-path layers, then barycentre sweeps.

    Args:
        nodes: In topological order.
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
    """The best of several sweeps, which order each layer by the mean place of its neighbours."""
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
    """Sort names with neighbours by their mean place; others keep their place."""
    means = {name: sum(places) / len(places) for name, places in ties.items()}
    moving = iter(sorted((n for n in layer if n in means), key=lambda n: means[n]))
    return [next(moving) if name in means else name for name in layer]


def break_columns(
    cut_edges: Sequence[int],
    width_of: Callable[[range], float],
    pitch: float,
    *,
    gutter: float,
) -> list[range]:
    """Choose the layers of each column.

    Args:
        cut_edges: How many edges run between layer i and i + 1: what a break there would cut.
        width_of: The width that a run of layers takes.
        pitch: Height of a layer.
        gutter: Room between columns.

    Returns:
        The layers of each column, top to bottom.
    """
    best, least = [], float("inf")
    for columns in range(1, 9):
        parts = _split(cut_edges, columns)
        if parts is None:
            break
        width = sum(width_of(part) + gutter for part in parts) - gutter
        badness = _badness(width, max(len(part) for part in parts) * pitch)
        badness += _CUT * sum(cut_edges[part.start - 1] - 1 for part in parts[1:])
        if badness < least:
            best, least = parts, badness
    return best


def _badness(width: float, height: float) -> float:
    """0 at the wanted shape; twice as tall is as bad as twice as wide."""
    ratio = width / height / _ASPECT
    return max(ratio, 1 / ratio) - 1


def _split(cut_edges: Sequence[int], columns: int) -> list[range] | None:
    """Columns of nearly equal height, each break moved to where it cuts fewest edges."""
    count = len(cut_edges) + 1
    if columns > 1 and count < 6 * columns:
        return None
    breaks = []
    for column in range(1, columns):
        ideal = round(count * column / columns)
        near = range(ideal - 3, ideal + 4)
        best = min(near, key=lambda i: (cut_edges[i - 1], abs(i - ideal)))
        if cut_edges[best - 1] > _MOST_CROSSING:
            return None
        breaks.append(best)
    ends = [0, *breaks, count]
    return [range(a, b) for a, b in pairwise(ends)]


def place_layers(
    layers: Sequence[Sequence[str]],
    neighbours: Sequence[Sequence[tuple[str, str]]],
    widths: Mapping[str, float],
    weights: Mapping[str, float],
    gap: float,
) -> dict[str, float]:
    """Centres of all nodes.

    Sweeps down and up move each layer towards its neighbours, as far as widths and gap allow. Heavy
    nodes have priority over light ones: the main path of a model becomes a straight line, and its
    shortcuts bend around it.

    Args:
        layers: Names in each layer, from left to right.
        neighbours: Edges between each layer and the next.
        widths: Of every name.
        weights: Of every name, above zero.
        gap: Between two names of a layer.
    """
    centres: dict[str, float] = {}
    for layer in layers:
        left = 0.0
        for name in layer:
            centres[name] = left + widths[name] / 2
            left += widths[name] + gap
    for sweep in range(_PULLS):
        down = sweep % 2 == 0
        levels = range(1, len(layers)) if down else range(len(layers) - 2, -1, -1)
        for level in levels:
            ties: dict[str, list[tuple[float, float]]] = {name: [] for name in layers[level]}
            for upper, lower in neighbours[level - 1 if down else level]:
                mine, other = (lower, upper) if down else (upper, lower)
                ties[mine].append((centres[other], weights[other]))
            placed = place_layer(
                [_middle(ties[name] or [(centres[name], 1.0)]) for name in layers[level]],
                [widths[name] for name in layers[level]],
                gap,
                weights=[weights[name] for name in layers[level]],
            )
            centres.update(zip(layers[level], placed, strict=True))
    return centres


def _middle(pulls: Sequence[tuple[float, float]]) -> float:
    """The weighted median of places: between two that pull equally, their mean."""
    ordered = sorted(pulls)
    half = sum(weight for _, weight in ordered) / 2
    seen = 0.0
    for i, (place, weight) in enumerate(ordered):
        seen += weight
        if i + 1 < len(ordered) and abs(seen - half) < 1e-6 * half:
            return (place + ordered[i + 1][0]) / 2
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
    layers: Sequence[Sequence[str]],
    passing: Iterable[Sequence[str]],
    widths: Mapping[str, float],
    gap: float,
) -> None:
    """Move the places that long edges pass through so that each edge bends as seldom as it can.

    Args:
        centres: Of all names; those of ``passing`` are changed.
        layers: Names in each layer, from left to right.
        passing: For each long edge the names it passes through, from top to bottom.
        widths: Of every name.
        gap: To the next name of the layer.
    """
    beside: dict[str, tuple[str | None, str | None]] = {}
    for layer in layers:
        for i, name in enumerate(layer):
            left = layer[i - 1] if i else None
            beside[name] = (left, layer[i + 1] if i + 1 < len(layer) else None)
    for names in passing:
        run: list[str] = []
        low, high = float("-inf"), float("inf")
        for name in names:
            least, most = _room(name, beside, centres, widths, gap)
            if run and max(low, least) > min(high, most):
                _align(centres, run, low, high)
                run, low, high = [], float("-inf"), float("inf")
            run.append(name)
            low, high = max(low, least), min(high, most)
        _align(centres, run, low, high)


def _room(
    name: str,
    beside: Mapping[str, tuple[str | None, str | None]],
    centres: Mapping[str, float],
    widths: Mapping[str, float],
    gap: float,
) -> tuple[float, float]:
    """How far left and right ``name`` may go; where it stands is always within."""
    left, right = beside[name]
    own, half = centres[name], widths[name] / 2
    least = centres[left] + widths[left] / 2 + gap + half if left else float("-inf")
    most = centres[right] - widths[right] / 2 - gap - half if right else float("inf")
    return min(least, own), max(most, own)


def _align(centres: dict[str, float], run: Sequence[str], low: float, high: float) -> None:
    mean = sum(centres[name] for name in run) / len(run)
    centres.update(dict.fromkeys(run, min(max(mean, low), high)))
