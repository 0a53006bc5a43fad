"""A budget as it is written on the command line, and the plan that fits in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bevfusion_quant._errors import InputError
from bevfusion_quant.sensitivity._measure import (
    KeptScores,
    MeanAp,
    TakenLate,
    run_late,
    sensitivity_output,
)

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion, BEVFusionConfig
    from bevfusion_quant.frames import FrameBatches
    from bevfusion_quant.ranks import Shards
    from bevquant_qnn import Budget, PrecisionPlan, RefinedPlan, SensitivityTable

__all__ = ["ROUNDS", "check_reachable", "parse_budget", "plan_within", "refine_within"]

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


ROUNDS = 2


def refine_within(
    model: BEVFusion,
    batches: FrameBatches,
    config: BEVFusionConfig,
    plan: PrecisionPlan,
    table: SensitivityTable,
    budget: Budget,
    *,
    output: str | None = None,
    rounds: int = ROUNDS,
    shards: Shards | None = None,
) -> RefinedPlan:
    """The best measured plan in the budget: `bevquant_qnn.refine_plan` of the detector.

    Args:
        model: The model that was measured; it is left as it was.
        batches: The frames that it was measured on.
        config: Sizes.
        plan: From `plan_within`.
        table: Its table, by "sqnr", "kl" or "mAP".
        budget: A limit on the estimated time or on the score.
        output: As it was measured; see `sensitivity_output`.
        rounds: Of as many plans as there are groups, for each precision beside int8.
        shards: Keeps what is finished while several ranks share the frames.

    Raises:
        InputError: The plan or the table is another model's, or the budget cannot be kept.
    """
    from bevquant_qnn import refine_plan

    path = sensitivity_output(model, table.metric, output)
    task = MeanAp(model, batches, config, shards) if table.metric == "mAP" else None
    try:
        return refine_plan(
            model,
            plan,
            TakenLate(batches, told=False),
            table,
            budget,
            metric=task,
            outputs=(path,) if path else (),
            rounds=rounds,
            forward=run_late,
            reduce=None if task is None else task.reduce,
            kept=None if shards is None else KeptScores(shards),
        )
    except ValueError as error:
        raise InputError(f"no plan: {error}") from error
