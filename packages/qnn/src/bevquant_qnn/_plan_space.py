"""All plans that a table of sensitivities knows: each group's precisions, with their costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from bevquant_graph import check_kind
from bevquant_qnn._precision import Precision, check_precisions, weight_bits
from bevquant_qnn._precision_groups import PrecisionGroup, precision_groups
from bevquant_qnn._precision_plan import PlannedGroup, PrecisionPlan
from bevquant_qnn._sensitivity_table import SensitivityRow, SensitivityTable

POINTS = 4096
"""Of a front: a plan's cost is exact, its loss within a hair of the least."""


class Choice(NamedTuple):
    """A choice for one group: its precision and loss, and its shares of the int8 model's costs."""

    precision: Precision
    loss: float
    time: float
    size: float


@dataclass(frozen=True)
class Point:
    """A choice for the first groups: sums, the choices before, and the last one."""

    loss: float
    time: float
    size: float
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


def front(
    groups: Sequence[Sequence[Choice]], points: int = POINTS, share: float = 0.0
) -> list[Point]:
    """Merge group after group; partial choices that another beats in both are dropped.

    Keeps `points` partial choices, evenly over the front; up to that many the result is exact.
    Losses may be negative. A choice costs (1 - share)·time + share·size. The front goes from low
    cost to high cost and small loss.
    """
    best: Sequence[Point | None] = [None]
    found: list[Point] = []
    for choices in groups:
        found = best = _merged(best, choices, points, share)
    return found


def _merged(
    before: Sequence[Point | None], choices: Sequence[Choice], points: int, share: float
) -> list[Point]:
    every = [
        Point(point.loss + loss, point.time + time, point.size + size, point, name)
        if point
        else Point(loss, time, size, None, name)
        for point in before
        for name, loss, time, size in choices
    ]
    every.sort(key=lambda p: ((1 - share) * p.time + share * p.size, p.loss, p.time))
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
    # For each row of the table.
    choices: tuple[tuple[Choice, ...], ...]

    def costs(self, precisions: Sequence[Precision]) -> tuple[float, float]:
        """Time and size of a choice for every row, as multiples of the int8 model's."""
        chosen = [
            next(choice for choice in choices if choice.precision == name)
            for choices, name in zip(self.choices, precisions, strict=True)
        ]
        return sum(choice.time for choice in chosen), sum(choice.size for choice in chosen)

    def plan(
        self, precisions: Sequence[Precision], score: float, *, measured: bool
    ) -> PrecisionPlan:
        """The plan of a choice for every row; groups that were switched off stay off."""
        rows = (frozenset(row.modules) for row in self.table)
        chosen = dict(zip(rows, precisions, strict=True))
        planned = (
            PlannedGroup(group.modules, chosen.get(frozenset(group.modules), "float"))
            for group in self.groups
        )
        time, size = self.costs(precisions)
        return PrecisionPlan(tuple(planned), time, score, self.table.metric, measured, size)


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
    sizes = [_weights(model, own[frozenset(row.modules)]) for row in table]
    all_sizes = sum(sizes) * weight_bits("int8") or 1.0

    def choice(row: SensitivityRow, size: int, name: Precision) -> Choice:
        time = row.operations * costs[name] / whole
        return Choice(name, table.loss(row, name), time, size * weight_bits(name) / all_sizes)

    choices = tuple(
        tuple(
            choice(row, size, name)
            for name in costs
            if name == "float" or name in row.alone
            # Without weights, int4 is int8 by another name.
            if name != "int4" or own[frozenset(row.modules)].weights
        )
        for row, size in zip(table, sizes, strict=True)
    )
    return PlanSpace(tuple(groups), table, choices)


def _weights(model: nn.Module, group: PrecisionGroup) -> int:
    """Number of weights that a group's quantizers round."""
    layers = map(model.get_submodule, group.modules)
    rounded = (m.weight for m in layers if getattr(m, "_weight_quantizer", None) in group.weights)
    return sum(w.numel() for w in set(rounded) if isinstance(w, Tensor))
