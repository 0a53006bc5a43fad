"""Plans around the estimated one, run on the frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bevfusion_quant._errors import InputError
from bevfusion_quant.sensitivity._kept_scores import KeptScores
from bevfusion_quant.sensitivity._late import TakenLate, run_late
from bevfusion_quant.sensitivity._measure import sensitivity_output
from bevfusion_quant.sensitivity._task import MeanAp

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion, BEVFusionConfig
    from bevfusion_quant.frames import FrameBatches
    from bevfusion_quant.ranks import Shards
    from bevquant_qnn import Budget, PrecisionPlan, RefinedPlan, SensitivityTable

__all__ = ["ROUNDS", "refine_within"]

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
