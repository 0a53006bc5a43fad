"""A budget as it is written on the command line, and the plan that fits in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bevfusion_quant._errors import InputError

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion
    from bevquant_qnn import Budget, PrecisionPlan, SensitivityTable

__all__ = ["check_reachable", "parse_budget", "plan_within"]

# The float model's own scores: nothing is above.
_BEST = {"sqnr": 144.5, "kl": 0.0, "mAP": 100.0}


def parse_budget(text: str) -> Budget:
    """Read "time=1.2" (of the int8 model's) or "score=35" (in the metric's unit).

    Raises:
        InputError: Anything else.

    Example:
        >>> parse_budget("time=1.2").time, parse_budget("score=35").score
        (1.2, 35.0)
    """
    from bevquant_qnn import Budget

    kind, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if kind not in ("time", "score") or not math.isfinite(number):
        raise InputError(
            f"--budget {text}: write time=1.2, a multiple of the int8 model's estimated time, or "
            "score=35, in the metric's unit"
        )
    return Budget(time=number) if kind == "time" else Budget(score=number)


def check_reachable(budget: Budget, metric: str, precisions: Sequence[str]) -> None:
    """Refuse before the measurement what no measurement can make possible.

    Raises:
        InputError: Less time than the fastest plan takes, or a score above any model's.
    """
    from bevquant_qnn import BIT_OPERATIONS

    if budget.time is not None:
        fastest = min(cost for name, cost in BIT_OPERATIONS.items() if name in precisions)
        if budget.time < fastest:
            raise InputError(
                f"--budget time={budget.time:g}: with --precisions {' '.join(precisions)} the "
                f"fastest plan takes {fastest:g} of the int8 model's estimated time"
            )
    elif budget.score is not None and budget.score > _BEST[metric]:
        raise InputError(
            f"--budget score={budget.score:g}: the largest {metric} that a model can have is "
            f"{_BEST[metric]:g}"
        )


def plan_within(
    model: BEVFusion, table: SensitivityTable, budget: Budget, **costs: Any
) -> PrecisionPlan:
    """The best plan in the budget: `bevquant_qnn.assign_precision`.

    Args:
        model: The model that was measured.
        table: Its table.
        budget: A limit on the estimated time or on the score.
        **costs: `costs`, time of one operation by precision, where yours are known.

    Raises:
        InputError: The table is another model's, or no plan lies within the budget.
    """
    from bevquant_qnn import assign_precision

    try:
        return assign_precision(model, table, budget, **costs)
    except ValueError as error:
        raise InputError(f"no plan: {error}") from error
