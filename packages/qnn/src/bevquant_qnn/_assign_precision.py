"""The best precisions within a budget, from the loss and the cost of each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from torch import nn

from bevquant_qnn._plan_space import Point, front, plan_space
from bevquant_qnn._precision import Precision
from bevquant_qnn._precision_plan import PrecisionPlan
from bevquant_qnn._sensitivity_table import SensitivityTable

BIT_OPERATIONS: Mapping[Precision, float] = MappingProxyType(
    {
        "w4a4": 0.25,
        "mxfp4": 0.5,
        "nvfp4": 0.5,
        "int4": 0.5,
        "int8": 1.0,
        "fp8": 1.0,
        "mxfp8": 1.0,
        "int16": 2.0,
        "float": 4.0,
    }
)
"""Time of one multiplication, relative to int8: bits of the activation times bits of the weight,
over 64; FP8 as int8, float as float16. Measure your chip's and give those where you can."""


@dataclass(frozen=True)
class Budget:
    """Limit of a plan: a score or a time.

    Attributes:
        score: Lowest allowed score, in the table's metric (dB, accuracy, …). The fastest plan that
            reaches it is chosen.
        time: Longest allowed time, as a multiple of the model's time with every group in int8. The
            plan with the best score within it is chosen.

    Raises:
        ValueError: Both or none are given, or one is not a finite number.
    """

    score: float | None = None
    time: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the budget that a text states: "time=1.2", or "score=35".

        Raises:
            ValueError: The text has another form.

        Example:
            >>> Budget.parse("time=1.2")
            Budget(score=None, time=1.2)
        """
        kind, _, value = text.partition("=")
        try:
            return cls(**{kind: float(value)})
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{text}: write time=1.2, a multiple of the int8 model's estimated time, or "
                "score=35, in the metric's unit"
            ) from error

    def __post_init__(self) -> None:
        given = [value for value in (self.score, self.time) if value is not None]
        if len(given) != 1 or not math.isfinite(given[0]):
            raise ValueError(
                f"Budget takes a finite score or a finite time, got score={self.score}, "
                f"time={self.time}"
            )


def assign_precision(
    model: nn.Module,
    sensitivity: SensitivityTable,
    budget: Budget,
    *,
    costs: Mapping[Precision, float] = BIT_OPERATIONS,
) -> PrecisionPlan:
    """Choose a precision for each group of layers: the best score within a time, or the reverse.

    Losses of groups add (noise powers for ``"sqnr"``, differences of scores otherwise), and so do
    times, operations · cost. The best choice is found by merging Pareto fronts: after each group,
    only partial plans remain that no other plan beats in both. The result is an estimate;
    `refine_plan` measures.

    Args:
        model: The measured model.
        sensitivity: Its table. A group may get any precision measured there, or ``"float"``.
        budget: Limit of the score or of the time.
        costs: Time of one operation by precision, in any unit. A precision without cost is not
            chosen. ``"int8"`` needs one.

    Returns:
        The plan, for `apply_precision`. Layers that share a quantizer have one precision.

    Raises:
        ValueError: The table belongs to another model, a cost is missing or not positive, or no
            plan is within the budget; the message states the best that is.

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
    space = plan_space(model, sensitivity, costs, "assign_precision")
    best = _within(front(space.choices), sensitivity, budget)
    score = sensitivity.score(best.loss)
    return space.plan(best.precisions(), best.cost, score, measured=False)


def plan_front(
    model: nn.Module,
    sensitivity: SensitivityTable,
    points: int = 12,
    *,
    costs: Mapping[Precision, float] = BIT_OPERATIONS,
) -> tuple[PrecisionPlan, ...]:
    """The plans of `assign_precision` for times between the fastest and the best plan's.

    Args:
        model: As of `assign_precision`, like the arguments without a description here.
        sensitivity: Its table.
        points: Number of times, in equal steps.
        costs: Time of one operation by precision.

    Returns:
        From fast to slow; estimated scores rise. Times with the same plan give one.

    Raises:
        ValueError: As `assign_precision`, or fewer than 2 points.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bevquant_quantizers import calibrate
        >>> from bevquant_qnn import quantize_model, sensitivity
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
        >>> images = torch.randn(2, 3, 8, 8)
        >>> net = quantize_model(net, example_inputs=images).model
        >>> report = calibrate(net, [images])
        >>> [round(plan.time, 2) for plan in plan_front(net, sensitivity(net, [images]))]
        [1.0, 1.39, 3.61, 4.0]
    """
    if points < 2:
        raise ValueError(f"plan_front: expected 2 points or more, got {points}")
    space = plan_space(model, sensitivity, costs, "plan_front")
    found = front(space.choices)
    first, last = (found[i].cost if found else 0.0 for i in (0, -1))
    times = (first + i * (last - first) / (points - 1) for i in range(points))
    chosen = {_within(found, sensitivity, Budget(time=time)): None for time in times if found}
    return tuple(
        space.plan(p.precisions(), p.cost, sensitivity.score(p.loss), measured=False)
        for p in chosen
    )


def _within(front: list[Point], table: SensitivityTable, budget: Budget) -> Point:
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
