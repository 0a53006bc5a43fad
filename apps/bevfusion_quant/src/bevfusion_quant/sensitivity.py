"""Quantization loss of each layer of a finished run, and the plan within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from bev_data.points import Frame
from bevfusion.quantization import (
    SensitivityOutcome,
    check_precisions,
    measure_sensitivity,
    plan_within,
    refine_within,
    sensitivity_text,
    study_sensitivity,
)
from bevfusion_quant._errors import InputError
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.options import Place
from bevfusion_quant.pages import write_found
from bevfusion_quant.run import Clock, RunSettings, new_run, return_freed_memory
from bevfusion_quant.saved_run import load_run, read_model_settings
from bevquant_qnn import Budget

__all__ = [
    "SensitivityOutcome",
    "SensitivityResult",
    "measure_sensitivity",
    "parse_budget",
    "plan_within",
    "precisions_of",
    "refine_within",
    "run_sensitivity",
    "sensitivity_text",
]


def parse_budget(text: str) -> Budget:
    """Parse "time=1.2" or "size=0.7" (relative to the int8 model), or "score=35".

    Raises:
        InputError: Another text.

    Example:
        >>> parse_budget("time=1.2").time, parse_budget("score=35").score
        (1.2, 35.0)
    """
    try:
        return Budget.parse(text)
    except ValueError as error:
        raise InputError(f"--budget {error}") from error


# Of activations of 8 bits, by the bits of weights.
_OWN = {8: "int8", 4: "int4"}


def precisions_of(
    settings: RunSettings, requested: Sequence[str], run: str | Path
) -> tuple[str, ...]:
    """The requested precisions, or the run's own: "int8", or "int4" for a run with 4-bit weights.

    Raises:
        InputError: No plan has the run's bits of weights, or the run's rounding method changed the
            weights, so its layers cannot return to float.
    """
    if settings.rounding != "nearest" or settings.bias_correction:
        raise InputError(
            f"{run}: its weights were rounded or its biases corrected (ptq --rounding gptq, "
            "--bias-correction), so no layer can be put back into float: measure a run without, "
            "and give its plan to ptq --plan together with these options"
        )
    bits = settings.weight_bits
    if bits not in _OWN:
        raise InputError(
            f"{run}: weights of {bits} bits are none of the precisions of a plan, which are int4, "
            "int8, int16 and fp8: measure a run of 8 or 4 bits"
        )
    return tuple(dict.fromkeys(requested)) or (_OWN[bits],)


@dataclass(frozen=True, eq=False)
class SensitivityResult:
    """Folder, result, seconds by step, peak memory in MiB."""

    folder: Path
    outcome: SensitivityOutcome
    seconds: dict[str, float]
    peak_memory_mib: float


def run_sensitivity(
    run: str | Path,
    frames: Sequence[Frame],
    *,
    metric: str = "sqnr",
    output: str | None = None,
    precisions: Sequence[str] = (),
    sparse_precisions: Sequence[str] = (),
    without: bool = True,
    estimate: bool = False,
    budget: str | None = None,
    plan_rounds: int = 2,
    cameras: Sequence[str] | None = None,
    **place: Unpack[Place],
) -> SensitivityResult:
    """Measure the quantization loss of each group of layers of a run, and write `runs/name`.

    The run's own folder is not changed. The new folder holds sensitivity.json, plan.json if a
    budget is given, summary.json and the page. If even the float model misses the requested score
    on these frames, there is no plan, and `outcome.refusal` says so.

    Args:
        run: A folder of `run_ptq`.
        frames: At least one.
        metric: "sqnr", "kl" or "mAP"; see `measure_sensitivity`.
        output: "map" or "heatmap"; see `sensitivity_output`.
        precisions: Precisions at which each group is measured alone: "int4", "int8", "int16",
            "fp8". Default: the run's own, "int8", or "int4" for 4-bit weights.
        sparse_precisions: The same of sparse convolutions. Default: `precisions`.
        without: Measure each group alone in float, too.
        estimate: Estimate "sqnr" from gradients, without that half. A plan is measured in any case.
        budget: "time=1.2", "size=0.7" or "score=35": choose precisions within it.
        plan_rounds: Rounds of measured plans around the estimate; see `bevquant_qnn.refine_plan`.
        cameras: Names of the cameras to use. Default: those of the run.
        **place: Where the measurement is written; see `Place`.

    Raises:
        InputError: The run, the options or the input are wrong. Nothing is written.
    """
    if asked := (*precisions, *sparse_precisions):
        check_precisions(asked)
    if estimate and metric != "sqnr":
        raise InputError(
            f"--estimate: it estimates sqnr alone; leave it out with --metric {metric}"
        )
    if plan_rounds < 0:
        raise InputError(f"--plan-rounds {plan_rounds}: it must not be negative")
    if budget is not None:
        parse_budget(budget)
    ran = read_model_settings(run)
    if ran.for_bpu:
        raise InputError(
            f"{run} is a run for a BPU: its layers have one precision, int8, or run on the CPU; "
            "sensitivity takes runs of ptq without --target bpu"
        )
    clock = Clock()
    precisions = precisions_of(ran, precisions, run)
    settings = {
        "measures": str(run),
        "config": ran.config,
        "metric": metric,
        "precisions": list(precisions),
        "budget": budget,
        "plan_rounds": plan_rounds if budget is not None else None,
        "weights": ran.weights,
        "cameras": cameras,
    }
    if estimate:
        settings["estimate"] = True
    if sparse_precisions:
        settings["sparse_precisions"] = list(sparse_precisions)
    with new_run("sensitivity", clock, keep=run, **place) as record:
        with clock.step("load the run"):
            loaded = load_run(run)
        model = loaded.quantized_model
        batches = FrameBatches(frames, loaded.sizes, model, cameras or ran.used_cameras)
        shards = record.shards(frames, {**settings, "without": without}, model)
        outcome = study_sensitivity(
            model, batches,
            metric=metric, output=output, precisions=precisions,
            sparse_precisions=sparse_precisions, without=without,
            estimate=estimate, budget=budget or "", rounds=plan_rounds, shards=shards,
            before_each=return_freed_memory, step=clock.step,
        )  # fmt: skip
        if outcome.refusal:
            outcome = replace(outcome, refusal=f"--budget {budget}: {outcome.refusal}")
        if not shards.ranks.first:  # the first one writes
            return SensitivityResult(record.path, outcome, *clock.spent())
        outcome.table.save(record.folder / "sensitivity.json")
        if outcome.plan is not None:
            outcome.plan.save(record.folder / "plan.json")
        seconds, peak = write_found(record, settings, ran, run, batches, sensitivity=outcome)
    return SensitivityResult(record.path, outcome, seconds, peak)
