"""The best precisions within a budget, from the loss and the cost of each layer."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from torch import nn

from bevquant_qnn._plan_space import POINTS, Choice, PlanSpace, Point, front, plan_space
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
    """Limits of a plan: a score, or a time, a size or both.

    Attributes:
        score: Lowest allowed score, in the table's metric (dB, accuracy, …). The fastest plan that
            reaches it is chosen.
        time: Longest allowed time, as a multiple of the model's time with every group in int8. The
            plan with the best score within the limits is chosen.
        size: Largest allowed size of the quantized layers' weights, as a multiple of their size in
            int8: 4-bit weights have 0.5, float16 ones 2. Activations count in `time` alone, so
            give it too where they may be int16 or float.

    Raises:
        ValueError: A score beside other limits, none at all, or one that is not finite.
    """

    score: float | None = None
    time: float | None = None
    size: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the budget that a text states: "time=1.2", "size=0.7", both, or "score=35".

        Raises:
            ValueError: The text has another form.

        Example:
            >>> Budget.parse("time=1.2,size=0.7")
            Budget(score=None, time=1.2, size=0.7)
        """
        try:
            pairs = [part.partition("=")[::2] for part in text.split(",")]
            values = {kind.strip(): float(value) for kind, value in pairs}
            if len(values) < len(pairs):
                raise ValueError(f"{text}: a limit is given twice")
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{text}: write time=1.2 or size=0.7, multiples of the int8 model's estimated time "
                "and size of weights, both with a comma between, or score=35, in the metric's unit"
            ) from error

    def __post_init__(self) -> None:
        limits = [value for value in (self.time, self.size) if value is not None]
        given = [*limits, *([] if self.score is None else [self.score])]
        alone = bool(limits) != (self.score is not None)
        if not alone or not all(map(math.isfinite, given)):
            raise ValueError(
                "Budget takes a finite score, or a finite time, size or both, got "
                f"score={self.score}, time={self.time}, size={self.size}"
            )

    @property
    def by_size(self) -> bool:
        """Whether plans are compared by their size: it is the only limit."""
        return self.time is None and self.size is not None

    def fits(self, time: float, size: float) -> bool:
        """Whether a plan of this time and size is within the limits."""
        # They are sums of floats: the model with every group in int8 must fit in 1.0.
        pairs = (time, self.time), (size, self.size)
        return all(limit is None or cost <= limit * (1 + 1e-9) for cost, limit in pairs)

    def text(self) -> str:
        """The limits in words."""
        kinds = {"time": self.time, "size": self.size}.items()
        given = ((kind, limit) for kind, limit in kinds if limit is not None)
        return " and ".join(f"{limit:g} of the int8 model's {kind}" for kind, limit in given)


def assign_precision(
    model: nn.Module,
    sensitivity: SensitivityTable,
    budget: Budget,
    *,
    costs: Mapping[Precision, float] = BIT_OPERATIONS,
) -> PrecisionPlan:
    """Choose a precision for each group of layers: the best score within a budget, or the reverse.

    Losses of groups add (noise powers for ``"sqnr"``, differences of scores otherwise), and so do
    times, operations · cost, and sizes, weights · bits. The best choice is found by merging Pareto
    fronts: after each group, only partial plans remain that no other plan beats in both. Two limits
    are one cost, a weighted mean, for each of nine weights. The result is an estimate;
    `refine_plan` measures.

    Args:
        model: The measured model.
        sensitivity: Its table. A group may get any precision measured there, or ``"float"``.
        budget: Limit of the score, or of time and size.
        costs: Time of one operation by precision, in any unit. A precision without cost is not
            chosen. ``"int8"`` needs one.

    Returns:
        The plan, for `apply_precision`. Layers that share a quantizer have one precision.

    Raises:
        ValueError: The table belongs to another model, a cost is missing or not positive, or no
            plan is within the budget; the message states the best that is.
        TypeError: The budget is a number or a text.

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
    if not isinstance(budget, Budget):
        raise TypeError(
            f"assign_precision: budget: expected a Budget, as Budget(time=1.2), got {budget!r}"
        )
    space = plan_space(model, sensitivity, costs, "assign_precision")
    best = _within(space, budget)
    return space.plan(best.precisions(), sensitivity.score(best.loss), measured=False)


def plan_front(
    model: nn.Module,
    sensitivity: SensitivityTable,
    points: int = 12,
    *,
    costs: Mapping[Precision, float] = BIT_OPERATIONS,
    by_size: bool = False,
) -> tuple[PrecisionPlan, ...]:
    """The plans of `assign_precision` for times between the fastest and the best plan's.

    Args:
        model: As of `assign_precision`, like the arguments without a description here.
        sensitivity: Its table.
        points: Number of times, in equal steps.
        costs: Time of one operation by precision.
        by_size: Sizes in place of times.

    Returns:
        From fast or small to slow or large; estimated scores rise. Times with the same plan give
        one.

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
    found = front(space.choices, share=float(by_size))
    values = [point.size if by_size else point.time for point in found]
    chosen: dict[Point, None] = {}
    for i in range(points if found else 0):
        limit = values[0] + i * (values[-1] - values[0]) / (points - 1)
        chosen[found[bisect_right(values, limit * (1 + 1e-9)) - 1]] = None
    return tuple(
        space.plan(p.precisions(), sensitivity.score(p.loss), measured=False) for p in chosen
    )


_SHARES = tuple(i / 8 for i in range(9))  # of the size in the cost


def fitting(
    groups: Sequence[Sequence[Choice]], budget: Budget, points: int = POINTS
) -> Iterator[Point]:
    """The plan of the least loss within the limits of time and size; several for both limits."""
    shares = _SHARES
    if budget.time is None or budget.size is None:
        shares = (float(budget.by_size),)
    for share in shares:
        found = [p for p in front(groups, points, share) if budget.fits(p.time, p.size)]
        yield from found[-1:]


def _within(space: PlanSpace, budget: Budget) -> Point:
    table = space.table
    if budget.score is None:
        best = min(fitting(space.choices, budget), key=lambda p: (p.loss, p.time), default=None)
        if best is not None:
            return best
        fastest, smallest = front(space.choices)[0], front(space.choices, share=1.0)[0]
        raise ValueError(
            f"assign_precision: no plan takes {budget.text()}; the fastest takes "
            f"{fastest.time:.4g} of the time, the smallest {smallest.size:.4g} of the size"
        )
    for point in front(space.choices):
        if table.score(point.loss) >= budget.score:
            return point
    raise ValueError(
        f"assign_precision: no plan reaches {table.metric} {budget.score:g}; float has "
        f"{table.float_score:.4g}"
    )
