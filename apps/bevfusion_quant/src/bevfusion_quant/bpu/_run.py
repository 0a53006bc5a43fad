"""A run for a BPU, from the float model to the page; saving and loading it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from bev_data.metrics import AccuracyAccumulator, Bootstrap
from bev_data.points import Frame
from bevfusion.deployment import UNIT_PREFIXES, cpu_weights, split_weights, unit_weights
from bevfusion.detectors import build_detector
from bevfusion.evaluation import PoorData, accuracy_accumulator, data_findings
from bevfusion.quantization import relative_change, whole_output
from bevfusion_quant._errors import InputError
from bevfusion_quant.bpu._prepare import Models, SplitUnits, bpu_parts, compare_forms, for_march
from bevfusion_quant.bpu_outcome import BpuOutcome
from bevfusion_quant.frames import FrameBatches, finding_lines
from bevfusion_quant.options import BpuConfig, Place
from bevfusion_quant.pages import EvaluatedRun
from bevfusion_quant.run import CONFIG_FILE, Clock, RunRecord, new_run
from bevfusion_quant.saved_run import read_model_settings
from bevfusion_quant.stages import built_parts, fill_weights, sizes_of
from bevquant_hybrid_tools.account import folded_norms, quantized_modules
from bevquant_hybrid_tools.forms import Forms
from bevquant_quantizers.documents import as_form, read_tensors, sha256, write_tensors, write_whole

WEIGHTS = "weights.safetensors"
_PACKAGES = ("bevquant-hybrid",)


@dataclass(frozen=True, eq=False)
class LoadedBpuRun:
    """A run's settings, its units with their forms, and the whole model in each form."""

    config: BpuConfig
    units: SplitUnits
    forms: dict[str, Forms]
    models: Models


def load_bpu_run(folder: str | Path) -> LoadedBpuRun:
    """Load a folder of `run_bpu`, bit for bit. Nothing is unpickled.

    Raises:
        InputError: The folder is no run for a BPU, or its files are damaged.
    """
    folder = Path(folder)
    saved = read_model_settings(folder)
    try:
        if not saved.for_bpu:
            raise ValueError("it was not made with --target bpu")
        if sha256(folder / WEIGHTS) != saved.sha256[WEIGHTS]:
            raise ValueError(f"{WEIGHTS} is not the file that the run wrote")
        entries = {field.name: saved.written[field.name] for field in fields(BpuConfig)}
        weights = None if entries["weights"] is None else Path(entries.pop("weights"))
        form = as_form(entries, BpuConfig, where=CONFIG_FILE, what="run's settings")
        config = replace(form, weights=weights)
        state = read_tensors(folder / WEIGHTS).tensors
        model = build_detector(
            sizes_of(config.model, config.config), built_parts(config.branch, config.model)
        )
        # The units' weights are in their graphs.
        wanted = cpu_weights(model, bpu_parts(config.branch, config.model))
        model.load_state_dict({**model.state_dict(), **{name: state[name] for name in wanted}})
        with for_march(config.march):
            units = SplitUnits(model, config)
            forms = units.finished(units.calibrating(), partial(unit_weights, state))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(
            f"{folder} cannot be loaded as a run for a BPU: {error}: give a folder that "
            "bevfusion-quant ptq --target bpu has written, unchanged"
        ) from error
    return LoadedBpuRun(config, units, forms, units.models(forms))


@dataclass(frozen=True, eq=False)
class BpuResult:
    """Folder, result, warnings, seconds by step, peak memory in MiB.

    `findings` concern the calibration frames.
    """

    folder: Path
    outcome: BpuOutcome
    warnings: tuple[str, ...]
    seconds: dict[str, float]
    peak_memory_mib: float
    findings: tuple[PoorData, ...] = ()


def run_bpu(frames: Sequence[Frame], config: BpuConfig, **place: Unpack[Place]) -> BpuResult:
    """Split the model between BPU and CPU, quantize the BPU's part, and write `runs/name`.

    Args:
        frames: At least one. Ranges come from the first `calibration_frames`, the comparison from
            all.
        config: Settings.
        **place: Where the run is written; see `Place`.

    Raises:
        InputError: The input is wrong. Nothing is written.
    """
    clock = Clock()
    count = config.calibration_count(len(frames))
    with new_run("ptq", clock, _PACKAGES, **place) as record, for_march(config.march):
        sizes: Any = sizes_of(config.model, config.config)
        with clock.step("build"):
            model = build_detector(sizes, built_parts(config.branch, config.model))
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
            wanted = whole_output(outcome.comparison.evaluation.wanted)
            change = relative_change(whole_output(model(*first)), wanted)
        warnings = _warnings(outcome, forms, findings)
        settings = {"target": "bpu", **asdict(config)}
        weights_file = record.folder / WEIGHTS
        graphs = {unit: form.fake_graph for unit, form in forms.items()}
        write_tensors(weights_file, split_weights(model, graphs, units.parts), {"format": "pt"})
        records = {
            "fusion": folding_record(units, change),
            "quantization": placement_record(forms, outcome),
        }
        seconds, peak = _write(
            record, outcome, batches, settings,
            decides={"sizes": asdict(sizes), "sha256": {WEIGHTS: sha256(weights_file)}},
            entries={"weights": weights, "calibration_frames": count, "warnings": warnings},
            records=records,
        )  # fmt: skip
    return BpuResult(record.path, outcome, warnings, seconds, peak, findings)


def run_bpu_evaluate(
    run: str | Path,
    frames: Sequence[Frame],
    *,
    cameras: Sequence[str] | None = None,
    bootstrap: Bootstrap | None = None,
    **place: Unpack[Place],
) -> BpuResult:
    """Compare a run's three models on other frames and write `runs/name`; the run is not changed.

    If frames have labels and the model has a head, the detections of every model are scored.

    Args:
        run: A folder of `run_bpu`.
        frames: At least one.
        cameras: Names of the cameras to use. Default: those of the run.
        bootstrap: Method of the intervals of the mean average precision. Default: `Bootstrap()`.
        **place: Where the evaluation is written; see `Place`.

    Raises:
        InputError: The run or the input is wrong. Nothing is written.
    """
    clock = Clock()
    with new_run("evaluate", clock, _PACKAGES, keep=run, **place) as record:
        with clock.step("load the run"):
            loaded = load_bpu_run(run)
        config, units = loaded.config, loaded.units
        sizes = sizes_of(config.model, config.config)
        with for_march(config.march):
            batches = FrameBatches(frames, sizes, units.model, cameras or config.cameras)
            with clock.step("read and voxelize"):
                units.run(units.fused, batches.head(1))
            accumulator = accuracy_accumulator(batches, bootstrap)
            outcome = _outcome(units, loaded.forms, batches, clock, accumulator)
        own = ("model", "config", "branch", "march", "weights")
        shown = {name: getattr(config, name) for name in own}
        settings = {"target": "bpu", "evaluates": str(run), **shown, "cameras": cameras}
        warnings = _warnings(outcome)
        seconds, peak = _write(
            record, outcome, batches, settings,
            decides={"run_sha256": read_model_settings(run).sha256},
            entries={"evaluates": str(run), "accuracy": None, "warnings": warnings},
        )  # fmt: skip
    return BpuResult(record.path, outcome, (), seconds, peak)


def _outcome(
    units: SplitUnits,
    forms: Mapping[str, Forms],
    batches: FrameBatches,
    clock: Clock,
    accumulator: AccuracyAccumulator | None = None,
) -> BpuOutcome:
    """Plan, estimate and comparison; with an accumulator, scores against labels."""
    with clock.step("partition"):
        plan = units.plan(forms)
    with clock.step("estimate"):
        estimates = units.estimates(forms)
    with clock.step("compare", blame="float and integer model cannot be compared"):
        comparison = compare_forms(units.models(forms), forms, batches, accumulator)
    if accumulator is None:
        return BpuOutcome(plan, comparison, estimates)
    with clock.step("judge by labels"):
        accuracy = accumulator.result()
    return BpuOutcome(plan, comparison, estimates, accuracy)


def _warnings(
    outcome: BpuOutcome, forms: Mapping[str, Forms] | None = None, findings: Sequence[PoorData] = ()
) -> tuple[str, ...]:
    """Warnings about the plan and, if this run made them, about forms and frames."""
    entries = [text for form in (forms or {}).values() for text in form.warnings]
    return (*entries, *finding_lines(findings), *outcome.plan.warnings, *outcome.violations)


def _write(
    record: RunRecord,
    outcome: BpuOutcome,
    batches: FrameBatches,
    settings: Mapping[str, Any],
    *,
    decides: Mapping[str, Any],
    entries: Mapping[str, Any],
    records: Mapping[str, Any] | None = None,
) -> tuple[dict[str, float], float]:
    """Write pictures, plan, settings, page, summary; `decides` holds settings not on the page."""
    evaluated = EvaluatedRun(
        record, batches, outcome.comparison.evaluation,
        records or {},
        bpu=outcome,
        accuracy=outcome.accuracy,
    )  # fmt: skip
    evaluated.draw(bpu_parts(settings["branch"], settings["model"])[-1])
    outcome.plan.save(record.folder / "plan.json")
    write_whole(record.folder / "partition.svg", outcome.picture)
    record.write_settings({**settings, **decides})
    evaluated.write_page(settings)
    return evaluated.write_summary({"target": "bpu", "branch": settings["branch"], **entries})


def folding_record(units: SplitUnits, change: float) -> dict[str, Any]:
    """Batch norms of the units and their convolutions; `change` is that of the output."""
    folded, kept = [], []
    for name, unit in units.units.items():
        for conv, bn, done in folded_norms(unit, units.fused[name], UNIT_PREFIXES[name]):
            if done:
                folded.append({"conv": conv, "bn": bn, "how": "identity"})
            else:
                inside = conv.removeprefix(UNIT_PREFIXES[name])
                kept.append({"bn": bn, "reason": f"{inside} did not take it"})
    return {"fused": folded, "skipped": kept, "largest_relative_change": change}


def placement_record(forms: Mapping[str, Forms], outcome: BpuOutcome) -> dict[str, Any]:
    """Quantized modules, and modules in float on the CPU with the reason."""
    quantized = [row._asdict() for form in forms.values() for row in quantized_modules(form)]
    skipped = [{"path": node.path, "reason": node.reason} for node in outcome.on_cpu]
    return {"quantized": quantized, "shared": [], "skipped": skipped}
