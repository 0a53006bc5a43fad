"""Each group of the detector's layers alone quantized, and alone in float; the plan made of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_type_hints

from torch import nn

from bev_data import InputError
from bevfusion.evaluation import FrameBatches
from bevfusion.model import Batch, Detector, Sizes
from bevfusion.quantization._mean_ap import KeptScores, MeanAp
from bevfusion.quantization._sensitivity_table import SensitivityOutcome
from bevfusion.steps import Step, silent_step
from bevquant_qnn import (
    BIT_OPERATIONS,
    Budget,
    PlannedGroup,
    PrecisionPlan,
    RefinedPlan,
    SensitivityTable,
    assign_precision,
    estimate_sensitivity,
    refine_plan,
    sensitivity,
)
from bevquant_quantizers import TensorQuantizer, calibrate
from bevquant_quantizers.ranks import Shards

LOG = logging.getLogger(__name__)

METRICS = ("sqnr", "kl", "mAP")
OUTPUTS = ("map", "heatmap")
_HEATMAP = "heads.object.heatmap_head"
_BEST = {"sqnr": 144.5, "kl": 0.0, "mAP": 100.0}  # the float model's own: nothing is above


class FramesInTurn(Sequence["Batch"]):
    """The frames, one by one.

    Args:
        batches: All of them.
        before_each: Called before each is made: what a recorded run held is of no use to frames
            with other numbers of voxels, and may be given back to the system.
        reported: Say of each when it is made.
    """

    def __init__(
        self, batches: FrameBatches, before_each: Callable[[], None], *, reported: bool = True
    ) -> None:
        self._batches, self._before_each, self._reported = batches, before_each, reported

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:  # type: ignore[override]
        self._before_each()
        if self._reported:
            LOG.info("frame %d of %d", index + 1, len(self))
        return self._batches[index]


def sensitivity_output(model: Detector, metric: str = "sqnr", output: str | None = None) -> str:
    """The path of the module whose output is scored; "" for the model's own.

    Args:
        model: The quantized model.
        metric: "sqnr", "kl" or "mAP".
        output: "map": the last bird's-eye view before the head; "heatmap": the head's. By default
            the heat map for "kl" and where the head is quantized, else the map.

    Raises:
        InputError: An unknown metric or output, or one that the model does not have.
    """
    if metric not in METRICS:
        raise InputError(f"metric={metric!r}: expected one of {', '.join(METRICS)}")
    if output not in (None, *OUTPUTS):
        raise InputError(f"output={output!r}: expected {' or '.join(OUTPUTS)}")
    if metric == "mAP":
        if output is not None:
            raise InputError(f"output={output!r}: mAP judges the boxes; leave it out")
        return ""
    has_head = "head" in model.parts
    if metric == "kl" and output == "map":
        raise InputError(
            "metric='kl' compares the classes of the heat map; the map has none: leave output= "
            "out, or measure with metric='sqnr'"
        )
    if not has_head and (metric == "kl" or output == "heatmap"):
        what = "metric='kl'" if metric == "kl" else "output='heatmap'"
        raise InputError(
            f"{what}: the model is {' and '.join(model.parts)} alone and has no heat map: "
            "measure with metric='sqnr' on its own map"
        )
    if not has_head:
        return ""
    # BEVFusion's head chooses queries behind its heatmap; CenterPoint's answers maps alone.
    heatmap = _HEATMAP if model.chooses else ""
    if metric == "kl" or output == "heatmap":
        return heatmap
    return heatmap if output is None and _is_quantized(model.head) else model.stages["decoder"]


def study_sensitivity(
    model: Detector,
    batches: FrameBatches,
    config: Sizes,
    *,
    metric: str = "sqnr",
    output: str | None = None,
    precisions: Sequence[str] = ("int8",),
    without: bool = True,
    estimate: bool = False,
    budget: str = "",
    rounds: int = 2,
    shards: Shards | None = None,
    before_each: Callable[[], None] = lambda: None,
    step: Step = silent_step,
) -> SensitivityOutcome:
    """Measure what every group of layers loses, and find the plan in a budget.

    A score that not even the float model reaches on these frames shows when they are measured: then
    there is no plan, and the outcome's `refusal` says why.

    Args:
        model: As `measure_sensitivity` takes it, like all but the following.
        batches: At least one frame.
        config: Sizes.
        metric: What scores.
        output: What "sqnr" and "kl" look at.
        precisions: At which each group is measured alone.
        without: Measure each group alone in float, too.
        estimate: Estimate instead.
        budget: As `bevquant_qnn.Budget.parse` reads it; "" for no plan.
        rounds: As `refine_within` takes it.
        shards: Keeps what is finished while several ranks share the frames.
        before_each: Called before each frame is made.
        step: Called around "measure" and "measure plans".

    Raises:
        InputError: As `measure_sensitivity`, or a budget that no plan of the precisions can keep.
    """
    limit = Budget.parse(budget) if budget else None
    chosen = tuple(dict.fromkeys(precisions))
    path = sensitivity_output(model, metric, output)
    if limit is not None:
        _check_reachable(limit, budget, metric, chosen)
    sharing: dict[str, Any] = {"output": output, "shards": shards, "before_each": before_each}
    with step("measure", "the sensitivity cannot be measured"):
        table = measure_sensitivity(
            model, batches, config,
            metric=metric, precisions=chosen, without=without, estimate=estimate, **sharing,
        )  # fmt: skip
    batches.share_notes(shards)
    estimated, refined, refusal = None, None, ""
    if limit is not None:
        try:
            estimated = plan_within(model, table, limit)
            with step("measure plans", "plans cannot be measured"):
                refined = refine_within(
                    model, batches, config, estimated, table, limit, rounds=rounds, **sharing
                )
        except InputError as error:  # what was measured is kept all the same
            refusal = str(error)
    plan = None if refined is None else refined.plan
    return SensitivityOutcome(table, path, chosen, plan, budget, refusal, estimated, refined)


def _check_reachable(limit: Budget, text: str, metric: str, precisions: Sequence[str]) -> None:
    """Refuse before the measurement what no measurement can make possible."""
    if limit.time is not None:
        fastest = min(cost for name, cost in BIT_OPERATIONS.items() if name in precisions)
        if limit.time < fastest:
            raise InputError(
                f"budget={text!r}: with precisions={' '.join(precisions)!r} the fastest plan takes "
                f"{fastest:g} times the int8 model's estimated time; give that much or more"
            )
    elif limit.score is not None and limit.score > _BEST[metric]:
        raise InputError(
            f"budget={text!r}: the largest {metric} that a model can have is {_BEST[metric]:g}"
        )


def measure_sensitivity(
    model: Detector,
    batches: FrameBatches,
    config: Sizes,
    *,
    metric: str = "sqnr",
    output: str | None = None,
    precisions: Sequence[str] = ("int8",),
    without: bool = True,
    estimate: bool = False,
    shards: Shards | None = None,
    before_each: Callable[[], None] = lambda: None,
) -> SensitivityTable:
    """Measure what every group of layers loses: `bevquant_qnn.sensitivity` of the detector.

    Frames are run one by one; of each, the activations of one run are held. With "int16" the
    frames are run once before, for the largest values of 16-bit ranges.

    Args:
        model: Calibrated; it is left as it was.
        batches: At least one frame.
        config: Sizes.
        metric: "sqnr", 10·log₁₀(Σf²/Σ(f − q)²) in dB; "kl", minus the divergence of the classes'
            softmax in nats, per cell of the heat map; neither reads labels. "mAP", nuScenes' in
            points of 100, over the frames that have labels.
        output: What "sqnr" and "kl" look at; see `sensitivity_output`.
        precisions: At which each group is measured alone: "int4", "int8", "int16".
        without: Measure each group alone in float, too: half of the time.
        estimate: `bevquant_qnn.estimate_sensitivity` instead, without that half.
        shards: Keeps what is finished while several ranks share the frames.
        before_each: Called before each frame is made.

    Raises:
        InputError: A metric, an output or precisions that cannot be measured, or no labels.
    """
    path = sensitivity_output(model, metric, output)
    check_precisions(precisions)
    task = MeanAp(model, batches, config, shards) if metric == "mAP" else None
    if "int16" in precisions:
        _collect(model, batches)
    frames = FramesInTurn(batches, before_each)
    options: dict[str, Any] = {
        "outputs": (path,) if path else (),
        "precisions": tuple(dict.fromkeys(precisions)),
        "kept": None if shards is None else KeptScores(shards),
    }
    if estimate:
        return estimate_sensitivity(model, frames, **options)
    options["reduce"] = None if task is None else task.reduce
    return sensitivity(model, frames, task or metric, without=without, **options)


def plan_precisions() -> tuple[str, ...]:
    """At which a group of layers can be measured alone: those of a plan but float."""
    there = get_args(get_type_hints(PlannedGroup)["precision"])
    return tuple(name for name in there if name != "float")


def check_precisions(precisions: Sequence[str]) -> None:
    """Refuse what is not measured here.

    Raises:
        InputError: Nothing, or something unknown.
    """
    known = plan_precisions()
    unknown = [name for name in precisions if name not in known]
    if unknown or not precisions:
        raise InputError(
            f"precisions={' '.join(unknown)!r}: name one or more of {', '.join(known)}; float "
            "is what they are compared with"
        )


def plan_within(
    model: Detector, table: SensitivityTable, budget: Budget, **costs: Any
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
    try:
        return assign_precision(model, table, budget, **costs)
    except ValueError as error:
        raise InputError(f"no plan: {error}") from error


def refine_within(
    model: Detector,
    batches: FrameBatches,
    config: Sizes,
    plan: PrecisionPlan,
    table: SensitivityTable,
    budget: Budget,
    *,
    output: str | None = None,
    rounds: int = 2,
    shards: Shards | None = None,
    before_each: Callable[[], None] = lambda: None,
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
        before_each: Called before each frame is made.

    Raises:
        InputError: The plan or the table is another model's, or the budget cannot be kept.
    """
    path = sensitivity_output(model, table.metric, output)
    task = MeanAp(model, batches, config, shards) if table.metric == "mAP" else None
    try:
        return refine_plan(
            model,
            plan,
            FramesInTurn(batches, before_each, reported=False),
            table,
            budget,
            metric=task,
            outputs=(path,) if path else (),
            rounds=rounds,
            reduce=None if task is None else task.reduce,
            kept=None if shards is None else KeptScores(shards),
        )
    except ValueError as error:
        raise InputError(f"no plan: {error}") from error


def _collect(model: Detector, batches: FrameBatches) -> None:
    """Let the calibrators see the frames; ranges stay what they are."""
    quantizers = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
    ranges = {q: (q.amax.clone(), q.channel_factors) for q in quantizers if q.amax is not None}
    calibrate(model, batches, forward=lambda net, batch: net(*batch), method="max")
    for quantizer, (amax, factors) in ranges.items():
        quantizer.amax, quantizer.channel_factors = amax, factors


def _is_quantized(part: nn.Module) -> bool:
    return any(isinstance(m, TensorQuantizer) and not m._disabled for m in part.modules())
