"""The whole job for a BPU: fuse, calibrate, prepare, convert, compare, plan, estimate, write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bevfusion.model import CONFIGS, build_model
from bevfusion_quant.bpu._compare import compare_forms, node_probes
from bevfusion_quant.bpu._prepare import SplitUnits
from bevfusion_quant.bpu._quantize import for_march
from bevfusion_quant.bpu._save import load_bpu_run, save_weights
from bevfusion_quant.bpu._units import node_labels
from bevfusion_quant.bpu._write import BpuResult, RunWriter, folding_record, placement_record
from bevfusion_quant.frames import FrameBatches, data_findings, finding_lines
from bevfusion_quant.measure import accuracy_tally, relative_change, whole_output
from bevfusion_quant.results import BpuOutcome
from bevfusion_quant.run import Clock, run_folder
from bevfusion_quant.steps import built_parts, fill_weights, quantized_parts, read_model_settings

if TYPE_CHECKING:
    from bev_data.metrics import AccuracyTally, Bootstrap
    from bev_data.points import Frame
    from bevfusion_quant.bpu._config import BpuConfig
    from bevfusion_quant.bpu._quantize import Forms

__all__ = ["run_bpu", "run_bpu_evaluate"]


def run_bpu(
    frames: Sequence[Frame],
    config: BpuConfig,
    *,
    runs: Path = Path("runs"),
    name: str = "ptq",
    overwrite: bool = False,
    command: str = "",
) -> BpuResult:
    """Split the model between BPU and CPU, quantize the BPU's part, and write `runs/name`.

    Args:
        frames: At least one; ranges come from the first `calibration_frames`, the comparison from
            all of them.
        config: What to do.
        runs: Folder of all runs.
        name: This run's folder in it.
        overwrite: Replace an earlier run of that name.
        command: The command line that repeats this run, for the summary.

    Raises:
        InputError: Whatever is wrong with the input; nothing is written then.
    """
    clock = Clock()
    count = config.calibration_count(len(frames))
    with run_folder(runs, name, overwrite=overwrite) as folder, for_march(config.march):
        sizes = CONFIGS[config.config]
        with clock.step("build"):
            model = build_model(sizes, built_parts(config.branch))
            batches = FrameBatches(frames, sizes, model, config.cameras)
        with clock.step("read and voxelize"):
            first = batches[0]
        weights, _ = fill_weights(model, config, first, clock)
        with clock.step("fuse", blame="the weights cannot be folded"):
            units = SplitUnits(model, config)
        with clock.step("calibrate", blame="no ranges can be found"):
            calibrated = units.calibrating()
            units.run(calibrated, batches.head(count))
        with clock.step("quantize", blame="the branch cannot be quantized this way"):
            forms = units.finished(calibrated)
        findings = data_findings(batches, count)
        outcome = _outcome(units, forms, batches, clock)
        with clock.step("check folding"), torch.no_grad():
            wanted = whole_output(outcome.comparison.judgement.wanted)
            change = relative_change(whole_output(model(*first)), wanted)
        writer = RunWriter(
            folder,
            outcome,
            batches,
            settings={"target": "bpu", **asdict(config)},
            records={
                "fusion": folding_record(units, change),
                "quantization": placement_record(forms, outcome),
            },
            command=command,
            warnings=(
                *(text for form in forms.values() for text in form.warnings),
                *finding_lines(findings),
            ),
            clock=clock,
        )
        writer.draw(quantized_parts(config.branch)[-1])
        writer.plan()
        digests = save_weights(folder, model, forms, config.branch)
        writer.config({"sizes": asdict(sizes), "sha256": digests})
        writer.page(name)
        seconds, peak = writer.summary({"weights": weights, "calibration_frames": count})
    return BpuResult(
        runs / name, outcome, writer.warnings, seconds, peak, holds_model=True, findings=findings
    )


def run_bpu_evaluate(
    run: str | Path,
    frames: Sequence[Frame],
    *,
    cameras: Sequence[str] | None = None,
    runs: Path = Path("runs"),
    name: str = "evaluate",
    overwrite: bool = False,
    command: str = "",
    bootstrap: Bootstrap | None = None,
) -> BpuResult:
    """Compare a run's three models on other frames and write `runs/name`; the run stays as it is.

    Where frames have labels and the model a head, every model's detections are judged by them.

    Args:
        run: A folder that `run_bpu` wrote.
        frames: At least one.
        cameras: Names of the cameras to use; those of the run by default.
        runs: Folder of all runs.
        name: The evaluation's folder in it.
        overwrite: Replace an earlier run of that name.
        command: The command line that repeats this evaluation, for the summary.
        bootstrap: How the intervals of the mean average precision are found; `Bootstrap()` by
            default.

    Raises:
        InputError: Whatever is wrong with the run or the input; nothing is written then.
    """
    clock = Clock()
    with run_folder(runs, name, overwrite=overwrite, keep=Path(run)) as folder:
        with clock.step("load the run"):
            loaded = load_bpu_run(run)
        config, units = loaded.config, loaded.units
        sizes = CONFIGS[config.config]
        with for_march(config.march):
            batches = FrameBatches(frames, sizes, units.model, cameras or config.cameras)
            with clock.step("read and voxelize"):
                units.run(units.fused, batches.head(1))
            tally = accuracy_tally(sizes, batches, bootstrap)
            outcome = _outcome(units, loaded.forms, batches, clock, tally)
        writer = RunWriter(
            folder,
            outcome,
            batches,
            settings={
                **{"target": "bpu", "evaluates": str(run), "config": config.config},
                **{"branch": config.branch, "march": config.march, "weights": config.weights},
                "cameras": cameras,
            },
            records={},
            command=command,
            warnings=(),
            clock=clock,
        )
        writer.draw(quantized_parts(config.branch)[-1])
        writer.plan()
        writer.config({"run_sha256": read_model_settings(run).sha256})
        writer.page(name)
        accuracy = None if outcome.accuracy is None else outcome.accuracy.summary()
        seconds, peak = writer.summary({"evaluates": str(run), "accuracy": accuracy})
    return BpuResult(runs / name, outcome, (), seconds, peak, holds_model=False)


def _outcome(
    units: SplitUnits,
    forms: Mapping[str, Forms],
    batches: FrameBatches,
    clock: Clock,
    tally: AccuracyTally | None = None,
) -> BpuOutcome:
    """Plan, estimate and comparison; with a tally, accuracy by labels."""
    with clock.step("partition"):
        plan = units.plan(forms)
    with clock.step("estimate"):
        estimates = units.estimates(forms)
    labels = {unit: node_labels(unit, form.fake_graph) for unit, form in forms.items()}
    with clock.step("compare", blame="float and integer model cannot be compared"):
        comparison = compare_forms(
            units.models(forms),
            node_probes(forms, labels),
            batches,
            CONFIGS[units.config.config],
            tally,
        )
    if tally is None:
        return BpuOutcome(plan, comparison, estimates)
    with clock.step("judge by labels"):
        accuracy = tally.result()
    return BpuOutcome(plan, comparison, estimates, accuracy)
