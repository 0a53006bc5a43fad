"""Post-training quantization of a detector or a part of it: one call, or step by step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from bev_data.datasets import write_frame_folder
from bev_data.metrics import (
    Accuracy,
    AgreementAccumulator,
    AgreementRow,
    Bootstrap,
    FoundRow,
    agreement_text,
)
from bev_data.points import Frame
from bevfusion.deployment import ExportedSet, watching
from bevfusion.detectors import build_detector, example_of, is_foreign
from bevfusion.evaluation import PoorData, accuracy_accumulator, data_findings
from bevfusion.model import example_batch
from bevfusion.quantization import (
    StageRow,
    compare_layers,
    layer_table,
    relative_change,
    round_detector,
    search_detector,
    stage_table,
    whole_output,
)
from bevfusion.quantization import calibrate_detector as calibrate_branch
from bevfusion_quant._errors import InputError
from bevfusion_quant.export import ONNX_FOLDER, export_model
from bevfusion_quant.frames import FrameBatches, finding_lines
from bevfusion_quant.integer import Simulation, check_backend, evaluate_models, lower_model
from bevfusion_quant.options import Place, PtqConfig
from bevfusion_quant.pages import EvaluatedRun
from bevfusion_quant.remedy import find_remedy
from bevfusion_quant.run import Clock, new_run, run_folder
from bevfusion_quant.saved_run import (
    EXAMPLE_FRAME,
    apply_plan,
    load_quantized,
    load_run,
    read_model_settings,
    read_plan,
    refuse_in_files,
    refuse_unfolded,
    refuse_unsigned,
    save_model,
)
from bevfusion_quant.stages import (
    built_parts,
    fill_weights,
    fuse_branch,
    keep_batch_norms,
    quantize_as,
    quantize_branch,
    quantized_parts,
    sizes_of,
)
from bevquant_qnn import LayerRow, PrecisionPlan, RoundingResult, WeightSize, weight_size
from bevquant_quantizers import CalibrationReport, QuantizerRow, watch_quantizers
from bevquant_quantizers.documents import plain
from bevquant_quantizers.ranks import current_ranks

__all__ = [
    "AgreementAccumulator",
    "EvaluateResult",
    "FrameBatches",
    "PtqConfig",
    "PtqResult",
    "agreement_text",
    "calibrate_branch",
    "compare_layers",
    "example_batch",
    "fuse_branch",
    "layer_table",
    "load_quantized",
    "load_run",
    "quantize_branch",
    "run_evaluate",
    "run_folder",
    "run_ptq",
    "stage_table",
    "watch_quantizers",
]


@dataclass(frozen=True)
class _RunResult:
    folder: Path
    layers: list[LayerRow]
    stages: list[StageRow]
    agreement: list[AgreementRow]
    labels_found: list[FoundRow]
    seconds: dict[str, float]
    peak_memory_mib: float
    simulation: Simulation | None = None
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PtqResult(_RunResult):
    """Folder, tables, warnings, seconds by step and memory of a run.

    `refused` is the reason why files could not be written; `notes` are facts about a model in other
    code; `left_out` lists results that are missing, with reasons; `random_weights` says that the
    model was not trained; `remedy` names layers that make a useless result usable in float.
    """

    quantizers: list[QuantizerRow]
    warnings: tuple[str, ...]
    findings: tuple[PoorData, ...] = ()
    exported: ExportedSet | None = None
    weights: WeightSize | None = None
    refused: str = ""
    random_weights: bool = False
    remedy: str = ""


def check_settings(
    config: PtqConfig, frames: int, *, needs_folding: str = ""
) -> tuple[int, PrecisionPlan | None]:
    """Number of calibration frames and the plan, of settings that agree; see `run_ptq`."""
    config.check_weights(needs_folding=needs_folding)
    plan = None if config.plan is None else read_plan(config.plan)
    return config.calibration_count(frames), plan


def run_ptq(
    frames: Sequence[Frame],
    config: PtqConfig,
    *,
    integers: str | None = None,
    export: str | None = None,
    **place: Unpack[Place],
) -> PtqResult:
    """Quantize the model or a part of it on the given frames and write `runs/name`.

    Several ranks share the frames. The first rank writes. All ranks return the same figures, except
    the quantizers' observations of the first frame, which only the first rank has.

    Args:
        frames: At least one. Ranges come from the first `calibration_frames`, the comparison from
            all.
        config: Settings.
        integers: Kernels of the integer model, such as "auto"; None for no integer model.
        export: Engine of the ONNX files, such as "tensorrt" or "onnxruntime"; None for no files.
        **place: Where the run is written; see `Place`.

    Raises:
        InputError: The input is wrong. Nothing is written.
    """
    clock = Clock()
    needs = "integers" if integers is not None else "files" if export is not None else ""
    count, plan = check_settings(config, len(frames), needs_folding=needs)
    if export is not None:
        refuse_unsigned(config.unsigned, "a run with --unsigned", export)
    if plan is not None and export is not None:
        refuse_in_files(plan, f"a run with {config.plan}", export)
    with new_run("ptq", clock, **place) as record:
        folder = record.folder
        with clock.step("build"):
            sizes = sizes_of(config.model, config.config, config.weights)
            float_model = build_detector(sizes, built_parts(config.branch, config.model))
            batches = FrameBatches(frames, sizes, float_model, config.cameras)
        with clock.step("read and voxelize"):
            first = batches[0]
        weights, unfolded = fill_weights(float_model, config, first, clock)
        # The folded model is compared with this.
        if unfolded is None and current_ranks().first:
            with clock.step("run unfolded"), torch.no_grad():
                unfolded = float_model(*first)
        example = example_of(sizes, first)
        with clock.step("fuse", blame="the weights cannot be folded"):
            fused = (fuse_branch if config.fold else keep_batch_norms)(float_model, example)
            del float_model  # as large as the folded one, and read no more
        with clock.step("quantize", blame="the branch cannot be quantized this way"):
            quantized = quantize_as(fused.model, example, config, plan)
        if not quantized.result.quantized:
            raise InputError(
                f"--model {config.model}: none of its layers is quantized: it has no convolution "
                "or linear layer that --exclude leaves; name another network"
            )
        if plan is not None:
            apply_plan(quantized.model, plan.before_calibration())
        settings = {"ptq": asdict(config), "command": record.command}
        shards = record.shards(frames, settings, fused.model)
        with clock.step("calibrate", blame="no ranges can be found"):
            report = calibrate_branch(
                quantized.model,
                batches.head(count),
                method=config.method,
                resume=shards.file("calibration"),
            )
        result = quantized.result
        if plan is not None:
            apply_plan(quantized.model, plan)
            result = replace(result, skipped=(*result.skipped, *plan.other_than_int8()))
        searched: list[dict[str, Any]] = []
        if config.search_ranges:
            with clock.step("search ranges", blame="the ranges cannot be searched"):
                found = search_detector(quantized.model, batches.head(count))
                searched = [asdict(row) for row in found.rows]
        rounded = None
        if config.changes_weights:
            with clock.step("round weights", blame="the weights cannot be rounded"):
                rounded = round_detector(
                    quantized.model, batches.head(count),
                    rounding=config.rounding, correct_bias=config.bias_correction,
                )  # fmt: skip
        low = lower_model(fused.model, quantized.model, batches, clock, integers)
        with ExitStack() as stack:  # not before: capturing runs the models on what is no frame
            models = {"float": fused.model, "fake": quantized.model} if export else {}
            known = {name: stack.enter_context(watching(m)) for name, m in models.items()}
            evaluation, simulation = evaluate_models(
                fused.model, quantized.model, low, batches, clock, folder, shards,
                branch=config.branch,
            )  # fmt: skip
        del low  # the integer model is saved, and read no more
        findings = data_findings(batches, count, report)
        poor = [str(finding) for finding in findings if finding.poor]
        tables, warned = evaluation.summary(), _warnings(report, findings)
        size = weight_size(quantized.model)
        outcome = partial(
            PtqResult,
            record.path,
            **tables,
            warnings=warned,
            findings=findings,
            weights=size,
            random_weights=config.weights is None and not is_foreign(config.model),
        )
        if not shards.ranks.first:  # the first one writes
            seconds, peak = clock.spent()
            return outcome(seconds=seconds, peak_memory_mib=peak, simulation=simulation)
        folding_error = relative_change(whole_output(unfolded), whole_output(evaluation.wanted))
        with clock.step("look for a remedy"):
            remedy = find_remedy(quantized.model, evaluation.layers, batches, config, plan, folder)
        exported, refused = None, ""
        if export is not None:
            try:
                exported = export_model(
                    fused.model, quantized.model, batches, clock, folder / ONNX_FOLDER,
                    target=export,
                    layers=() if simulation is None else simulation.layers,
                    command=record.command,
                    run=str(record.path),
                    settings=asdict(config),
                    calibration=poor,
                    known=known,
                )  # fmt: skip
            except InputError as error:  # the rest of the run is kept
                refused = str(error)
        records = plain(
            {
                "fusion": {
                    "fused": fused.result.fused,
                    "skipped": fused.result.skipped,
                    "largest_relative_change": folding_error,
                },
                "quantization": {
                    key: getattr(result, key) for key in ("quantized", "shared", "skipped")
                },
                "calibration": {**plain(report), "findings": findings},
            }
        )
        for quantizer in records["calibration"]["quantizers"]:
            del quantizer["findings"]  # which are told above, with names of frames
        evaluated = EvaluatedRun(
            record, batches, evaluation, records,
            simulation=simulation,
            exported=exported,
            remedy=remedy,
        )  # fmt: skip
        evaluated.draw(quantized_parts(config.branch, config.model)[-1])
        with clock.step("write"):
            digests = save_model(folder, quantized.model, fused.model, plan)
            example_frame = replace(batches.frame(0), labels=None)
            if is_foreign(config.model) and example_frame.points is not None:
                write_frame_folder(folder / EXAMPLE_FRAME, example_frame)
            record.write_settings(
                {
                    **asdict(config),
                    "sizes": plain(sizes),
                    "sha256": digests,
                    **({"poor_calibration": poor} if poor else {}),
                }
            )
        evaluated.write_page(asdict(config), size)
        read = enumerate(batches.listed())
        seconds, peak = evaluated.write_summary(
            {
                "branch": config.branch,
                "frames": [{**frame, "calibration": index < count} for index, frame in read],
                "weights": weights,
                "weight_bytes": asdict(size),
                **({"refused": refused} if refused else {}),
                **({"remedy": remedy} if remedy else {}),
                **({} if rounded is None else {"rounding": _rounding(rounded)}),
                **({"searched_ranges": searched} if searched else {}),
            }
        )
    if exported is not None:
        exported = replace(exported, folder=record.path / ONNX_FOLDER)
    return outcome(
        seconds=seconds, peak_memory_mib=peak, simulation=simulation, exported=exported,
        refused=refused, remedy=remedy, notes=evaluated.notes, left_out=evaluated.left_out,
    )  # fmt: skip


def _warnings(report: CalibrationReport, findings: Sequence[PoorData]) -> tuple[str, ...]:
    """Suspicious results of the calibration, one line per quantizer."""
    named = [f"{q.name}: {text}" for q in report.quantizers for text in q.warnings]
    return (*report.warnings, *named, *finding_lines(findings))


def _rounding(result: RoundingResult) -> dict[str, Any]:
    keys = ("path", "nearest", "error")
    return {
        "layers": [{key: getattr(layer, key) for key in keys} for layer in result.layers],
        "skipped": [{"path": path, "reason": reason} for path, reason in result.skipped],
    }


@dataclass(frozen=True, kw_only=True)
class EvaluateResult(_RunResult):
    """Folder, tables, seconds by step, peak memory in MiB.

    `accuracy` is None without a head or without labels.
    """

    accuracy: Accuracy | None = None


def run_evaluate(
    run: str | Path,
    frames: Sequence[Frame],
    *,
    cameras: Sequence[str] | None = None,
    integers: str | None = None,
    layer_frames: int | None = None,
    bootstrap: Bootstrap | None = None,
    **place: Unpack[Place],
) -> EvaluateResult:
    """Compare a run's models on the given frames and write `runs/name`.

    The float model is the run's own, with batch norms folded if the run folded them. The run's own
    folder is not changed. If frames have labels and the model has a head, the detections of every
    model are scored.

    Args:
        run: A folder of `run_ptq`.
        frames: At least one.
        cameras: Names of the cameras to use. Default: those of the run.
        integers: Kernels of the integer model, such as "auto"; None for float and fake-quantized
            alone.
        layer_frames: Number of frames, from the first, on which each integer operation is compared
            with float and fake-quantized. Default: all.
        bootstrap: Method of the intervals of the mean average precision. Default: `Bootstrap()`.
        **place: Where the evaluation is written; see `Place`.

    Raises:
        InputError: The run or the input is wrong. Nothing is written.
    """
    if integers is not None:
        check_backend(integers)
        refuse_unfolded(read_model_settings(run), run, "run in integers")
    if layer_frames is not None and layer_frames < 1:
        raise InputError(f"layer_frames={layer_frames}: compare layers on one frame or more")
    clock = Clock()
    with new_run("evaluate", clock, keep=run, **place) as record:
        with clock.step("load the run"):
            loaded = load_run(run)
        ran, model, sizes = loaded.settings, loaded.quantized_model, loaded.sizes
        batches = FrameBatches(frames, sizes, model, cameras or ran.used_cameras)
        classes = sizes.head.classes  # none of a detector in other code that names none
        accumulator = accuracy_accumulator(batches, bootstrap) if classes else None
        settings: dict[str, Any] = {"evaluates": str(run), "config": ran.config}
        settings |= {"weights": ran.weights, "cameras": cameras}
        decides = {"integers": integers, "layer_frames": layer_frames, "command": record.command}
        shards = record.shards(frames, settings | decides, loaded.float_model, model)
        low = lower_model(loaded.float_model, model, batches, clock, integers)
        evaluation, simulation = evaluate_models(
            loaded.float_model, model, low, batches, clock, record.folder, shards,
            branch=ran.branch,
            accumulator=accumulator,
            layer_frames=layer_frames,
        )  # fmt: skip
        with clock.step("judge by labels"):
            accuracy = None if accumulator is None else accumulator.result()
        tables = evaluation.summary()
        made = partial(
            EvaluateResult,
            record.path,
            **{key: rows for key, rows in tables.items() if key != "quantizers"},
            simulation=simulation,
            accuracy=accuracy,
        )
        if not shards.ranks.first:  # the first one writes
            seconds, peak = clock.spent()
            return made(seconds=seconds, peak_memory_mib=peak)
        evaluated = EvaluatedRun(
            record, batches, evaluation, simulation=simulation, accuracy=accuracy
        )
        evaluated.draw(quantized_parts(ran.branch, ran.model)[-1])
        record.write_settings({"run_sha256": ran.sha256, **settings})
        evaluated.write_page(settings)
        seconds, peak = evaluated.write_summary({"evaluates": str(run), "accuracy": None})
    return made(
        seconds=seconds, peak_memory_mib=peak, notes=evaluated.notes, left_out=evaluated.left_out
    )
