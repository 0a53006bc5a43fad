"""Give every node of every layer a horizontal place: edges straight, nothing overlapping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

__all__ = ["place_layer", "place_layers", "straighten"]

_SWEEPS = 17  # odd, so that the last one goes down


def place_layers(
    layers: Sequence[Sequence[str]],
    neighbours: Sequence[Sequence[tuple[str, str]]],
    widths: Mapping[str, float],
    weights: Mapping[str, float],
    gap: float,
) -> dict[str, float]:
    """Centres of all nodes.

    Sweeps down and up move each layer towards what it is tied to, as closely as the widths and the
    gap allow. Heavy nodes go where they wish and light ones give way: the main path of a model
    becomes a straight line, and its shortcuts bend around it.

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
    for sweep in range(_SWEEPS):
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
