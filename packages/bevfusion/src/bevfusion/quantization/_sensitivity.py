"""Quantization loss of each group of the detector's layers, and the plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_type_hints

from torch import nn

from bev_data import InputError
from bevfusion.evaluation import FrameBatches
from bevfusion.model import Batch, Detector
from bevfusion.quantization._sensitivity_table import KeptScores, MeanAp, SensitivityOutcome
from bevfusion.steps import Step, silent_step
from bevquant_qnn import (
    BIT_OPERATIONS,
    Budget,
    PlannedGroup,
    PrecisionGroup,
    PrecisionPlan,
    QuantSparseConvolution,
    RefinedPlan,
    SensitivityTable,
    assign_precision,
    estimate_sensitivity,
    plan_front,
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
    """The frames, one by one; `before_each` is called before each is made."""

    def __init__(
        self, batches: FrameBatches, before_each: Callable[[], None], *, reported: bool = True
    ) -> None:
        self._batches, self._before_each, self._reported = batches, before_each, reported

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:  # type: ignore[override]
        # Cached results of a run are useless for frames with other numbers of voxels, and their
        # memory can be returned.
        self._before_each()
        if self._reported:
            LOG.info("frame %d of %d", index + 1, len(self))
        return self._batches[index]


def sensitivity_output(model: Detector, metric: str = "sqnr", output: str | None = None) -> str:
    """Path of the module whose output is scored; "" for the model's own.

    Args:
        model: The quantized model.
        metric: "sqnr", "kl" or "mAP".
        output: "map": the last bird's-eye view before the head; "heatmap": the head's. Default: the
            heat map for "kl" and for a quantized head, else the map.

    Raises:
        InputError: An unknown metric or output, or one that the model lacks.
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
    *,
    metric: str = "sqnr",
    output: str | None = None,
    precisions: Sequence[str] = ("int8",),
    sparse_precisions: Sequence[str] = (),
    without: bool = True,
    estimate: bool = False,
    budget: str = "",
    rounds: int = 2,
    shards: Shards | None = None,
    before_each: Callable[[], None] = lambda: None,
    step: Step = silent_step,
) -> SensitivityOutcome:
    """Measure the quantization loss of every group of layers, and find the plan in a budget.

    If even the float model misses the requested score on these frames, there is no plan, and the
    outcome's `refusal` says so.

    Args:
        model: As for `measure_sensitivity`, like the arguments without a description here.
        batches: At least one frame.
        metric: Metric of the score.
        output: Output that "sqnr" and "kl" compare.
        precisions: Precisions at which each group is measured alone.
        sparse_precisions: The same of sparse convolutions.
        without: Measure each group alone in float, too.
        estimate: Estimate instead.
        budget: Text for `bevquant_qnn.Budget.parse`; "" for no plan.
        rounds: As for `refine_within`.
        shards: Storage of finished results while several ranks share the frames.
        before_each: Called before each frame is made.
        step: Called around "measure" and "measure plans".

    Raises:
        InputError: As `measure_sensitivity`, or no plan of these precisions keeps the budget.
    """
    limit = Budget.parse(budget) if budget else None
    chosen = tuple(dict.fromkeys((*precisions, *sparse_precisions)))
    path = sensitivity_output(model, metric, output)
    if limit is not None:
        _check_reachable(limit, budget, metric, chosen)
    sharing: dict[str, Any] = {"output": output, "shards": shards, "before_each": before_each}
    with step("measure", "the sensitivity cannot be measured"):
        table = measure_sensitivity(
            model, batches,
            metric=metric, precisions=precisions, sparse_precisions=sparse_precisions,
            without=without, estimate=estimate, **sharing,
        )  # fmt: skip
    batches.share_notes(shards)
    estimated, refined, refusal = None, None, ""
    if limit is not None:
        try:
            estimated = plan_within(model, table, limit)
            with step("measure plans", "plans cannot be measured"):
                refined = refine_within(
                    model, batches, estimated, table, limit, rounds=rounds, **sharing
                )
        except InputError as error:  # what was measured is kept all the same
            refusal = str(error)
    plan = None if refined is None else refined.plan
    front = plan_front(model, table, by_size=limit is not None and limit.by_size)
    return SensitivityOutcome(table, path, chosen, plan, budget, refusal, estimated, refined, front)


def _check_reachable(limit: Budget, text: str, metric: str, precisions: Sequence[str]) -> None:
    """Refuse an impossible request before the measurement."""
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
    *,
    metric: str = "sqnr",
    output: str | None = None,
    precisions: Sequence[str] = ("int8",),
    sparse_precisions: Sequence[str] = (),
    without: bool = True,
    estimate: bool = False,
    shards: Shards | None = None,
    before_each: Callable[[], None] = lambda: None,
) -> SensitivityTable:
    """Measure the quantization loss of every group of layers with `bevquant_qnn.sensitivity`.

    Frames run one by one, and only one frame's activations are in memory. With "int16" or "fp8"
    the frames run once more in advance, for the ranges of these formats.

    Args:
        model: The calibrated model; not changed.
        batches: At least one frame.
        metric: "sqnr", 10·log₁₀(Σf²/Σ(f − q)²) in dB; "kl", minus the divergence of the classes'
            softmax in nats, per cell of the heat map; neither needs labels. "mAP", nuScenes' in
            points of 100, over the labelled frames.
        output: Output that "sqnr" and "kl" compare; see `sensitivity_output`.
        precisions: Precisions at which each group is measured alone: "int4", "int8", "int16"
            or "fp8".
        sparse_precisions: The same of groups with sparse convolutions; by default `precisions`.
        without: Measure each group alone in float, too: half of the time.
        estimate: `bevquant_qnn.estimate_sensitivity` instead, without that half.
        shards: Storage of finished results while several ranks share the frames.
        before_each: Called before each frame is made.

    Raises:
        InputError: A metric, an output or precisions that cannot be measured, or no labels.
    """
    scored = _scored(sensitivity_output(model, metric, output), shards)
    check_precisions((*precisions, *sparse_precisions))
    task = MeanAp(model, batches, shards=shards) if metric == "mAP" else None
    if {"int16", "fp8"}.intersection((*precisions, *sparse_precisions)):
        _collect(model, batches)
    frames = FramesInTurn(batches, before_each)
    scored["precisions"] = lambda group: (
        sparse_precisions if sparse_precisions and _is_sparse(model, group) else precisions
    )
    if estimate:
        return estimate_sensitivity(model, frames, **scored)
    reduce = None if task is None else task.reduce
    return sensitivity(model, frames, task or metric, without=without, reduce=reduce, **scored)


def _is_sparse(model: nn.Module, group: PrecisionGroup) -> bool:
    layers = (model.get_submodule(path) for path in group.modules)
    return any(isinstance(layer, QuantSparseConvolution) for layer in layers)


def _scored(path: str, shards: Shards | None) -> dict[str, Any]:
    kept = None if shards is None else KeptScores(shards)
    return {"outputs": (path,) if path else (), "kept": kept}


def plan_precisions() -> tuple[str, ...]:
    """Precisions at which a group of layers can be measured alone: those of a plan except float."""
    there = get_args(get_type_hints(PlannedGroup)["precision"])
    return tuple(name for name in there if name != "float")


def check_precisions(precisions: Sequence[str]) -> None:
    """Refuse unknown precisions.

    Raises:
        InputError: None, or an unknown one.
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
        model: The measured model.
        table: Its table.
        budget: A limit on the score, or on estimated time and size.
        **costs: `costs`, time of one operation by precision, if you know it.

    Raises:
        InputError: The table belongs to another model, or no plan keeps the budget.
    """
    try:
        return assign_precision(model, table, budget, **costs)
    except ValueError as error:
        raise InputError(f"no plan: {error}") from error


def refine_within(
    model: Detector,
    batches: FrameBatches,
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
        model: The measured model; not changed.
        batches: The frames of the measurement.
        plan: Result of `plan_within`.
        table: Its table, by "sqnr", "kl" or "mAP".
        budget: A limit on the score, or on estimated time and size.
        output: Output of the measurement; see `sensitivity_output`.
        rounds: Number of rounds; each measures as many plans as there are groups, for each
            precision beside int8.
        shards: Storage of finished results while several ranks share the frames.
        before_each: Called before each frame is made.

    Raises:
        InputError: The plan or the table belongs to another model, or the budget cannot be kept.
    """
    scored = _scored(sensitivity_output(model, table.metric, output), shards)
    if table.metric == "mAP":
        task = MeanAp(model, batches, shards=shards)
        scored |= {"metric": task, "reduce": task.reduce, "interval": task.interval}
    frames = FramesInTurn(batches, before_each, reported=False)
    try:
        return refine_plan(model, plan, frames, table, budget, rounds=rounds, **scored)
    except ValueError as error:
        raise InputError(f"no plan: {error}") from error


def _collect(model: Detector, batches: FrameBatches) -> None:
    """Run the calibrators on the frames without changing ranges."""
    quantizers = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
    ranges = {q: (q.amax.clone(), q.channel_factors) for q in quantizers if q.amax is not None}
    calibrate(model, batches, forward=lambda net, batch: net(*batch), method="max")
    for quantizer, (amax, factors) in ranges.items():
        quantizer.amax, quantizer.channel_factors = amax, factors


def _is_quantized(part: nn.Module) -> bool:
    return any(isinstance(m, TensorQuantizer) and not m._disabled for m in part.modules())
