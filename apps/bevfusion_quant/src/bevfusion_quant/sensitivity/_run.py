"""Sensitivity of a finished run's model, in a run folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bevfusion.model import CONFIGS
from bevfusion_quant._errors import InputError
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.results import SensitivityOutcome
from bevfusion_quant.run import Clock, RunRecord, run_folder, run_shards
from bevfusion_quant.sensitivity._budget import (
    ROUNDS,
    check_reachable,
    parse_budget,
    plan_within,
    refine_within,
)
from bevfusion_quant.sensitivity._measure import (
    check_precisions,
    measure_sensitivity,
    sensitivity_output,
)
from bevfusion_quant.steps import load_run, read_model_settings

if TYPE_CHECKING:
    from bev_data.points import Frame
    from bevfusion_quant.run import RunSettings

__all__ = ["SensitivityResult", "precisions_of", "run_sensitivity"]

# Of activations of 8 bits, by the bits of weights.
_OWN = {8: "int8", 4: "int4"}


def precisions_of(settings: RunSettings, asked: Sequence[str], run: str | Path) -> tuple[str, ...]:
    """Those asked for, or the run's own: "int8", or of a run with weights of 4 bits "int4".

    Args:
        settings: Of the run.
        asked: At which to measure; empty for the run's own.
        run: Where it lies, for the message.

    Raises:
        InputError: The run's weights have bits that are no precision of a plan, or were rounded so
            that its layers cannot be put back into float.
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
            "int8 and int16: measure a run of 8 or 4 bits"
        )
    return tuple(asked) or (_OWN[bits],)


@dataclass(frozen=True, eq=False)
class SensitivityResult:
    """Where the run lies, what it found, seconds by step, peak memory in MiB."""

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
    without: bool = True,
    budget: str | None = None,
    plan_rounds: int = ROUNDS,
    cameras: Sequence[str] | None = None,
    runs: Path = Path("runs"),
    name: str = "sensitivity",
    overwrite: bool = False,
    command: str = "",
) -> SensitivityResult:
    """Measure what each group of layers of a run's model loses, and write `runs/name`.

    The run is read and left as it is. The folder holds sensitivity.json, plan.json where a budget
    is given, summary.json and the page. A score that even the float model does not reach on these
    frames is known when they are measured: then there is no plan, and `outcome.refusal` says so.

    Args:
        run: A folder that `run_ptq` wrote.
        frames: At least one.
        metric: "sqnr", "kl" or "mAP"; see `measure_sensitivity`.
        output: "map" or "heatmap"; see `sensitivity_output`.
        precisions: At which each group is measured alone: "int4", "int8", "int16"; by default the
            run's own, "int8", or "int4" where its weights have 4 bits.
        without: Measure each group alone in float, too.
        budget: "time=1.2" or "score=35": choose precisions within it.
        plan_rounds: Of measuring plans around the estimated one; see `bevquant_qnn.refine_plan`.
        cameras: Names of the cameras to use; those of the run by default.
        runs: Folder of all runs.
        name: This run's folder in it.
        overwrite: Replace an earlier run of that name.
        command: The command line that repeats it, for the summary.

    Raises:
        InputError: Whatever is wrong with the run, the options or the input; nothing is written
            then.
    """
    from bevfusion_quant.report import write_found

    if precisions:
        check_precisions(precisions)
    if plan_rounds < 0:
        raise InputError(f"--plan-rounds {plan_rounds}: it must not be negative")
    limit = None if budget is None else parse_budget(budget)
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
    with run_folder(runs, name, overwrite=overwrite, keep=Path(run)) as folder:
        with clock.step("load the run"):
            model = load_run(run).quantized_model
        path = sensitivity_output(model, metric, output)
        if limit is not None:
            check_reachable(limit, metric, precisions)
        sizes = CONFIGS[ran.config]
        batches = FrameBatches(frames, sizes, model, cameras or ran.used_cameras)
        shards = run_shards(runs, name, frames, {**settings, "without": without}, model)
        with clock.step("measure", blame="the sensitivity cannot be measured"):
            table = measure_sensitivity(
                model,
                batches,
                sizes,
                metric=metric,
                output=output,
                precisions=precisions,
                without=without,
                shards=shards,
            )
        batches.share_notes(shards)
        estimated, refined, refusal = None, None, ""
        if limit is not None:
            try:
                estimated = plan_within(model, table, limit)
                with clock.step("measure plans", blame="plans cannot be measured"):
                    refined = refine_within(
                        model,
                        batches,
                        sizes,
                        estimated,
                        table,
                        limit,
                        output=output,
                        rounds=plan_rounds,
                        shards=shards,
                    )
            except InputError as error:  # what was measured is kept all the same
                refusal = f"--budget {budget}: {error}"
        outcome = SensitivityOutcome(
            table,
            path,
            tuple(precisions),
            None if refined is None else refined.plan,
            budget or "",
            refusal,
            estimated,
            refined,
        )
        if not shards.ranks.first:  # the first one writes
            return SensitivityResult(runs / name, outcome, *clock.spent())
        table.save(folder / "sensitivity.json")
        if refined is not None:
            refined.plan.save(folder / "plan.json")
        record = RunRecord(folder, command, clock)
        seconds, peak = write_found(record, name, settings, ran, run, batches, sensitivity=outcome)
    shards.remove()
    return SensitivityResult(runs / name, outcome, seconds, peak)
