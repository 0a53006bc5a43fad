"""Choices for several groups that no other beats in both cost and loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bevquant_qnn._precision import Precision

__all__ = ["Choice", "Point", "front"]

# The plan's cost is exact, its loss within a hair of the least.
_POINTS = 4096


class Choice(NamedTuple):
    """What one group may be: its precision, what that costs and what it loses."""

    precision: Precision
    cost: float
    loss: float


@dataclass(frozen=True)
class Point:
    """A choice for the first groups: sums, the choices before, and the last one."""

    cost: float
    loss: float
    before: Point | None
    precision: Precision

    def precisions(self) -> tuple[Precision, ...]:
        """The choice of every group, in their order."""
        chosen: list[Precision] = []
        point: Point | None = self
        while point is not None:
            chosen.append(point.precision)
            point = point.before
        return tuple(reversed(chosen))


def front(groups: Sequence[Sequence[Choice]], points: int = _POINTS) -> list[Point]:
    """Merge group after group; partial choices that another beats in both are dropped.

    Args:
        groups: What each may be; losses may be negative.
        points: How many partial choices are kept, evenly over the front. Up to that many, the
            result is exact.

    Returns:
        From cheap and bad to dear and good.
    """
    best: Sequence[Point | None] = [None]
    found: list[Point] = []
    for choices in groups:
        found = best = _merged(best, choices, points)
    return found


def _merged(before: Sequence[Point | None], choices: Sequence[Choice], points: int) -> list[Point]:
    every = [
        Point(
            (point.cost if point else 0.0) + cost,
            (point.loss if point else 0.0) + loss,
            point,
            name,
        )
        for point in before
        for name, cost, loss in choices
    ]
    every.sort(key=lambda point: (point.cost, point.loss))
    best: list[Point] = []
    for point in every:
        if not best or point.loss < best[-1].loss:
            best.append(point)
    if len(best) <= points:
        return best
    step = (len(best) - 1) / (points - 1)
    return [best[round(i * step)] for i in range(points)]
