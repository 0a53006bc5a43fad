"""Break a tall picture into columns that are read one after the other, like a page of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

__all__ = ["break_columns"]

_ASPECT = 1.25  # width over height that a screen shows well
_MOST_CROSSING = 3  # edges that one break may cut
_CUT = 0.15  # how bad it is to cut one more


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
