"""The best precisions within a budget, from what each layer loses and what each costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from bevquant_qnn._precision import Precision, check_precisions
from bevquant_qnn._precision_groups import precision_groups
from bevquant_qnn._precision_plan import PlannedGroup, PrecisionPlan
from bevquant_qnn._sensitivity_table import SensitivityTable

__all__ = ["BIT_OPERATIONS", "Budget", "assign_precision"]

BIT_OPERATIONS: Mapping[Precision, float] = MappingProxyType(
    {"int4": 0.5, "int8": 1.0, "int16": 2.0, "float": 4.0}
)
"""Time of one multiplication, relative to int8: bits of the activation times bits of the weight,
over 64; float as float16. Measure your chip's and give those where you can."""

# Points of the front that are kept: the plan's cost is exact, its loss within a hair of the least.
_POINTS = 4096


@dataclass(frozen=True)
class Budget:
    """What a plan may cost: one of both.

    Attributes:
        score: Least score by the table's metric (dB, accuracy, …); the fastest such plan is taken.
        time: Most time, as a multiple of the model's with every group in int8; the plan with the
            best score is taken.

    Raises:
        ValueError: Both or none are given, or one that is no finite number.
    """

    score: float | None = None
    time: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.score, self.time) if value is not None]
        if len(given) != 1 or not math.isfinite(given[0]):
            raise ValueError(
                f"Budget takes a finite score or a finite time, got score={self.score}, "
                f"time={self.time}"
            )


@dataclass(frozen=True)
class _Point:
    """A choice for the first groups."""

    cost: float
    loss: float
    before: _Point | None
    precision: Precision


def assign_precision(
    model: nn.Module,
    sensitivity: SensitivityTable,
    budget: Budget,
    *,
    costs: Mapping[Precision, float] = BIT_OPERATIONS,
) -> PrecisionPlan:
    """Choose a precision for each group of layers: the best score in a time, or the reverse.

    Losses of groups add up (noise powers for ``"sqnr"``, differences of scores otherwise), and so
    do times, operations · cost. Of all choices the best is found by merging fronts: after each
    group only those partial plans stay that no other beats in both. An estimate: check the plan's
    model on held-out data.

    Args:
        model: The model that was measured.
        sensitivity: Its table; a group may get any precision measured there, or ``"float"``.
        budget: Limit on the score or on the time.
        costs: Time of one operation by precision, in any unit; a precision that has none is not
            chosen. ``"int8"`` must have one.

    Returns:
        The plan, for `apply_precision`. Layers that share a quantizer have one precision.

    Raises:
        ValueError: The table is another model's, a cost is missing or no positive number, or no
            plan lies within the budget; the best that does is said.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bevquant_quantizers import calibrate
        >>> from bevquant_qnn import quantize_model, sensitivity
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
        >>> images = torch.randn(2, 3, 8, 8)
        >>> net = quantize_model(net, example_inputs=images).model
        >>> report = calibrate(net, [images])
        >>> plan = assign_precision(net, sensitivity(net, [images]), Budget(time=1.6))
        >>> plan["0"], plan["2"]  # the first has seven times as many multiplications
        ('int8', 'float')
    """
    groups = precision_groups(model)
    rows = {frozenset(row.modules): row for row in sensitivity}
    _check(rows, (frozenset(group.modules) for group in groups), costs)
    whole = math.fsum(row.operations for row in sensitivity) * costs["int8"] or 1.0
    # Without weights, int4 is int8 by another name.
    weighted = {frozenset(group.modules) for group in groups if group.weights}
    front: Sequence[_Point | None] = [None]
    for row in sensitivity:
        choices = [
            (name, row.operations * costs[name] / whole, sensitivity.loss(row, name))
            for name in costs
            if name == "float" or name in row.alone
            if name != "int4" or frozenset(row.modules) in weighted
        ]
        front = _front(front, choices)
    found = [point for point in front if point is not None]
    best = _within(found, sensitivity, budget)
    chosen: list[Precision] = []
    point: _Point | None = best
    while point is not None:
        chosen.append(point.precision)
        point = point.before
    by_modules = dict(zip(rows, reversed(chosen), strict=True))
    planned = (
        # Groups that were switched off when the table was made stay off.
        PlannedGroup(group.modules, by_modules.get(frozenset(group.modules), "float"))
        for group in groups
    )
    return PrecisionPlan(
        tuple(planned), best.cost, sensitivity.score(best.loss), sensitivity.metric
    )


def _front(
    points: Sequence[_Point | None], choices: list[tuple[Precision, float, float]]
) -> list[_Point]:
    """Every point with every choice, but for those that another beats in cost and in loss."""
    every = [
        _Point(
            (point.cost if point else 0.0) + cost,
            (point.loss if point else 0.0) + loss,
            point,
            name,
        )
        for point in points
        for name, cost, loss in choices
    ]
    every.sort(key=lambda point: (point.cost, point.loss))
    best: list[_Point] = []
    for point in every:
        if not best or point.loss < best[-1].loss:
            best.append(point)
    if len(best) <= _POINTS:
        return best
    step = (len(best) - 1) / (_POINTS - 1)
    return [best[round(i * step)] for i in range(_POINTS)]


def _within(front: list[_Point], table: SensitivityTable, budget: Budget) -> _Point:
    """The best point in the budget; the front runs from cheap and bad to dear and good."""
    if budget.time is not None:
        # Times are sums of floats: the model with every group in int8 must fit in 1.0.
        fitting = [point for point in front if point.cost <= budget.time * (1 + 1e-9)]
        if not fitting:
            raise ValueError(
                f"assign_precision: no plan takes {budget.time:g} of the int8 model's time; the "
                f"fastest takes {front[0].cost:.4g}"
            )
        return fitting[-1]
    for point in front:
        if table.score(point.loss) >= (budget.score or 0.0):
            return point
    raise ValueError(
        f"assign_precision: no plan reaches {table.metric} {budget.score:g}; float has "
        f"{table.float_score:.4g}"
    )


def _check(
    measured: Iterable[frozenset[str]],
    own: Iterable[frozenset[str]],
    costs: Mapping[Precision, float],
) -> None:
    check_precisions(costs, "assign_precision: costs")
    bad = [f"{name}={cost}" for name, cost in costs.items() if not 0 < cost < math.inf]
    if bad or "int8" not in costs:
        raise ValueError(
            "assign_precision: costs must be positive numbers, with one for 'int8', got "
            f"{', '.join(bad) or dict(costs)}"
        )
    others = [", ".join(sorted(modules)) for modules in set(measured) - set(own)]
    if others:
        raise ValueError(
            f"assign_precision: the table is another model's: no group of this one holds "
            f"{'; '.join(sorted(others))}. Measure this model"
        )
