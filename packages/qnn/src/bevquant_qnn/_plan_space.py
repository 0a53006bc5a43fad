"""All plans that a table of sensitivities knows: each group's precisions, with time and loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from bevquant_graph import check_kind
from bevquant_qnn._precision import Precision, check_precisions
from bevquant_qnn._precision_groups import PrecisionGroup, precision_groups
from bevquant_qnn._precision_plan import PlannedGroup, PrecisionPlan
from bevquant_qnn._sensitivity_table import SensitivityTable

# The plan's cost is exact, its loss within a hair of the least.
_POINTS = 4096


class Choice(NamedTuple):
    """A choice for one group: its precision, cost and loss."""

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

    Keeps `points` partial choices, evenly over the front; up to that many the result is exact.
    Losses may be negative. The front goes from low cost to high cost and small loss.
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
        # In the order of costs: kept is what loses less than all cheaper points.
        if not best or point.loss < best[-1].loss:
            best.append(point)
    if len(best) <= points:
        return best
    step = (len(best) - 1) / (points - 1)
    return [best[round(i * step)] for i in range(points)]


Precisions = tuple[Precision, ...]


@dataclass(frozen=True, eq=False)
class PlanSpace:
    """Choices of each row of a table."""

    # Groups of the model, in its order; those that were off when the table was made too.
    groups: tuple[PrecisionGroup, ...]
    # Loss of each group alone.
    table: SensitivityTable
    # For each row of the table. Costs are shares of the int8 model's time.
    choices: tuple[tuple[Choice, ...], ...]

    def time(self, precisions: Sequence[Precision]) -> float:
        """Estimated time of a choice for every row, as a multiple of the int8 model's."""
        return sum(
            next(choice.cost for choice in choices if choice.precision == name)
            for choices, name in zip(self.choices, precisions, strict=True)
        )

    def plan(
        self, precisions: Sequence[Precision], time: float, score: float, *, measured: bool
    ) -> PrecisionPlan:
        """The plan of a choice for every row; groups that were switched off stay off."""
        rows = (frozenset(row.modules) for row in self.table)
        chosen = dict(zip(rows, precisions, strict=True))
        planned = (
            PlannedGroup(group.modules, chosen.get(frozenset(group.modules), "float"))
            for group in self.groups
        )
        return PrecisionPlan(tuple(planned), time, score, self.table.metric, measured)


def plan_space(
    model: nn.Module, table: SensitivityTable, costs: Mapping[Precision, float], where: str
) -> PlanSpace:
    """Choices of `model`'s groups, by `table` and `costs`; errors begin with `where`."""
    check_kind(table, SensitivityTable, "a SensitivityTable")
    check_precisions(costs, f"{where}: costs")
    bad = [f"{name}={cost}" for name, cost in costs.items() if not 0 < cost < math.inf]
    if bad or "int8" not in costs:
        raise ValueError(
            f"{where}: costs must be positive numbers, with one for 'int8', got "
            f"{', '.join(bad) or dict(costs)}"
        )
    groups = precision_groups(model)
    own = {frozenset(group.modules): group for group in groups}
    others = [", ".join(sorted(row.modules)) for row in table if frozenset(row.modules) not in own]
    if others:
        raise ValueError(
            f"{where}: the table is another model's: no group of this one holds "
            f"{'; '.join(sorted(others))}. Measure this model"
        )
    whole = math.fsum(row.operations for row in table) * costs["int8"] or 1.0
    choices = tuple(
        tuple(
            Choice(name, row.operations * costs[name] / whole, table.loss(row, name))
            for name in costs
            if name == "float" or name in row.alone
            # Without weights, int4 is int8 by another name.
            if name != "int4" or own[frozenset(row.modules)].weights
        )
        for row in table
    )
    return PlanSpace(tuple(groups), table, choices)
