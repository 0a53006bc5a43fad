"""`ptq` for a network of any code: mmdetection3d's, OpenPCDet's, or a function of the user.

The network is folded, quantized, calibrated, compared, run in integers and written as files. Boxes
are compared where its code makes them; mean average precision, stages and maps are not, since
nobody says which tensor is which.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from bev_data.boxes import Detections
from bev_data.metrics import AgreementAccumulator
from bev_data.points import Frame
from bevfusion.frameworks import ForeignDetector, load_detector
from bevfusion.quantization import FloatPart, Simulation, layer_table, simulation_text
from bevfusion_quant._errors import InputError
from bevfusion_quant.options import Place, Rounding
from bevfusion_quant.pages import (
    ReportBoxes,
    ReportContent,
    ReportFigure,
    ReportScene,
    cost_figures,
    write_report,
)
from bevfusion_quant.run import PAGE_FILE, Clock, RunRecord, new_run, plain
from bevquant_export import DetectorExport, export_detector
from bevquant_fusion import fuse_model
from bevquant_int8sim import compare, simulate, usable_backend
from bevquant_qnn import (
    LayerRow,
    QuantConfig,
    WeightSize,
    compare_layers,
    quantize_model,
    round_weights,
    weight_size,
)
from bevquant_quantizers import calibrate, save_ranges, watching_quantizers
from bevquant_quantizers.documents import write_tensors

LOG = logging.getLogger(__name__)
ONNX_FOLDER = "onnx"
INTEGER_FOLDER = "integer"
_NOTES = 5
EXTENT = (-54.0, -54.0, 54.0, 54.0)
"""Of the picture and of the labels that count, where a model does not state its own [m]."""


@dataclass(frozen=True)
class AnyConfig:
    """What decides the result of such a run.

    Args:
        model: As `--model` names it.
        weights: The checkpoint; None for the model's own weights.
        method: How activation ranges are chosen.
        calibration_frames: How many frames, from the first, set the ranges; 0 for all.
        exclude: Paths or globs to leave float.
        weight_bits: Bits of every quantized weight.
        rounding: "nearest" or "gptq".
        bias_correction: Whether biases take up the mean shift of rounding.
        target: Engine of the dense file.
    """

    model: str
    weights: Path | None = None
    method: str = "mse"
    calibration_frames: int = 0
    exclude: tuple[str, ...] = ()
    weight_bits: int = 8
    rounding: Rounding = "nearest"
    bias_correction: bool = False
    target: str = "tensorrt11"


@dataclass(frozen=True)
class AnyResult:
    """What such a run gave; the fields of `PtqResult` that it has, and its files."""

    folder: Path
    layers: list[LayerRow]
    simulation: Simulation
    weights: WeightSize
    files: DetectorExport | None
    files_text: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    seconds: dict[str, float]
    peak_memory_mib: float


class _Batches:
    """The arguments for each frame, made when they are asked for."""

    def __init__(self, detector: ForeignDetector, frames: Sequence[Frame]) -> None:
        self.detector, self.frames = detector, frames

    def __len__(self) -> int:
        return len(self.frames)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return (self.detector.arguments(frame) for frame in self.frames)


def run_any(frames: Sequence[Frame], config: AnyConfig, **place: Unpack[Place]) -> AnyResult:
    """Quantize a network of any code on the given frames and write `runs/name`.

    Args:
        frames: At least one.
        config: What to do.
        **place: Where the run is written; see `Place`.

    Raises:
        InputError: The model cannot be had, run or quantized; nothing is written then.
    """
    clock = Clock()
    count = config.calibration_frames or len(frames)
    if not 1 <= count <= len(frames):
        raise InputError(f"--calibration-frames {count} of {len(frames)} frames: give 1 to all")
    with warnings.catch_warnings(), new_run("ptq", clock, **place) as record:
        warnings.filterwarnings("ignore", "Using a non-tuple sequence")  # spconv's own dense()
        with clock.step("build"), redirect_stdout(StringIO()):  # mmengine prints
            detector = load_detector(config.model, config.weights)
        every = _Batches(detector, frames)
        ranging = _Batches(detector, frames[:count])
        with clock.step("read and voxelize"):
            example = next(iter(every))
        with clock.step("fuse", blame="the weights cannot be folded"):
            fused = fuse_model(detector.network, example)
        with clock.step("quantize", blame="the model cannot be quantized"):
            settings = QuantConfig(exclude=config.exclude, weight_bits=config.weight_bits)
            quantized = quantize_model(fused.model, settings, example)
        with clock.step("calibrate", blame="no ranges can be found"):
            report = calibrate(quantized.model, ranging, method=config.method)
        if config.rounding != "nearest" or config.bias_correction:
            with clock.step("round weights", blame="the weights cannot be rounded"):
                round_weights(
                    quantized.model, ranging, rounding=config.rounding,
                    correct_bias=config.bias_correction,
                )  # fmt: skip
        with clock.step("compare", blame="the models cannot be compared"):
            with watching_quantizers(quantized.model) as seen:
                layers = compare_layers(fused.model, quantized.model, every)
        with clock.step("run in integers", blame="the model has no integer form"):
            simulation, wanted = _simulate(
                fused.model, quantized.model, example, every, record.folder
            )
        with clock.step("write ONNX files"):
            files, refused = _export(quantized.model, example, every, record.folder, config.target)
        text = "" if files is None else _files_text(files, record)
        size = weight_size(quantized.model)
        findings = (*report.warnings, *map(str, report.poor), *refused)
        with clock.step("write"):
            save_ranges(quantized.model, record.folder / "ranges.json")
            state = quantized.model.state_dict()
            tensors = {n: t for n, t in state.items() if isinstance(t, torch.Tensor)}
            write_tensors(record.folder / "weights.safetensors", tensors, {"format": "pt"})
            record.write_settings({"any": plain(asdict(config))})
        records = {
            "fusion": {"fused": fused.fused, "skipped": fused.skipped},
            "quantization": {
                key: getattr(quantized, key) for key in ("quantized", "shared", "skipped")
            },
            "calibration": {**plain(report), "findings": ()},
        }
        names = [frame.name for frame in frames]
        with clock.step("page"):
            content = ReportContent(
                title=record.path.name,
                config=config.model,
                frames=names,
                figures=_figures(size, simulation, files),
                scene=_scene(detector, frames[0], wanted, simulation.detections),
                layers=layers,
                quantizers=seen,
                integers=simulation,
                **plain_records(records),
                **record.on_page(plain(asdict(config))),
            )
            write_report(record.folder / PAGE_FILE, content)
        seconds, peak = record.write_summary(
            {
                "frames": names,
                "weight_bytes": asdict(size),
                "layers": layers,
                "integers": simulation.summary(),
                "files": text.splitlines(),
                "warnings": findings,
                "notes": detector.notes,
            }
        )
    return AnyResult(
        record.path, layers, simulation, size, files, text, detector.notes, findings, seconds, peak
    )


def _files_text(files: DetectorExport, record: RunRecord) -> str:
    """What was written, by the paths that it has when the run is finished."""
    return str(files).replace(str(record.folder), str(record.path))


def plain_records(records: dict[str, Any]) -> dict[str, Any]:
    """Records of folding, quantizing and calibrating as the page takes them."""
    made: dict[str, Any] = plain(records)
    for quantizer in made["calibration"]["quantizers"]:
        quantizer.pop("findings", None)
    return made


def _simulate(
    float_model: nn.Module,
    quantized_model: nn.Module,
    example: tuple[Any, ...],
    batches: _Batches,
    folder: Path,
) -> tuple[Simulation, Detections | None]:
    """Three executions layer by layer, boxes and seconds; the float boxes of the first frame."""
    model = simulate(quantized_model, example)
    table = compare(float_model, model, batches)
    detector = batches.detector
    agreement = AgreementAccumulator(detector.classes, EXTENT)
    seconds: list[float] = []
    first: tuple[Detections | None, Detections | None] = None, None  # float, integers
    for frame, batch in zip(batches.frames, batches, strict=True):
        start = time.perf_counter()
        outputs = model(*batch)
        seconds.append(time.perf_counter() - start)
        if detector.boxes is not None:
            with torch.no_grad():
                wanted = detector.boxes(float_model(*batch), frame)
            found = detector.boxes(outputs, frame)
            agreement.add(wanted, found, frame.labels if detector.classes else None)
            first = (wanted, found) if first[1] is None else first
    try:
        model.save(folder / INTEGER_FOLDER)
    except ValueError as error:  # a part that runs in float and is code of the user
        LOG.warning("the integer model is not saved: %s", error)
    simulation = Simulation(
        table.rows,
        (),
        tuple(FloatPart(f.path, f.what, f.reason, f.share) for f in model.float_fallbacks),
        tuple(agreement.agreement()) if detector.boxes is not None else (),
        tuple(agreement.found()),
        usable_backend("auto").name,
        tuple(seconds),
        (),
        first[1],
        operations=model.operations,
        integer_share=model.integer_share,
    )
    return simulation, first[0]


def _export(
    model: nn.Module, example: tuple[Any, ...], batches: _Batches, folder: Path, target: str
) -> tuple[DetectorExport | None, tuple[str, ...]]:
    """The files, or why none can be written."""
    try:
        made = export_detector(model, example, folder / ONNX_FOLDER, target, batches=batches)
    except (ValueError, ImportError) as error:
        return None, (f"no ONNX files: {error}",)
    return made, ()


def _figures(
    size: WeightSize, simulation: Simulation, files: DetectorExport | None
) -> list[ReportFigure]:
    figures = list(cost_figures(size, simulation))
    if files is not None:
        names = [f.path.name for f in (files.sparse, files.dense) if f is not None]
        figures.append(ReportFigure("Files, verified", ", ".join(names), f"for {files.target}"))
    return figures


def _scene(
    detector: ForeignDetector, frame: Frame, wanted: Detections | None, found: Detections | None
) -> ReportScene | None:
    if frame.points is None:
        return None
    inside = (abs(frame.points[:, 0]) < EXTENT[2]) & (abs(frame.points[:, 1]) < EXTENT[3])
    drawn: dict[str, Any] = {}
    for name, boxes in (("float", wanted), ("integer", found)):
        if boxes is not None:
            names = [detector.class_name(number) for number in boxes.labels]
            drawn[f"{name}_detections"] = ReportBoxes(boxes.boxes, names, boxes.scores)
    if frame.labels is not None:
        drawn["labels"] = ReportBoxes(frame.labels.boxes, frame.labels.names)
    return ReportScene(frame.name, frame.points[inside], EXTENT, cameras=frame.cameras, **drawn)


def any_text(result: AnyResult) -> list[str]:
    """Paragraphs of the tables: layers, integers, files; what is left out and why."""
    parts = ["Float against fake-quantized, output of each layer", layer_table(result.layers)]
    text = simulation_text(result.simulation, layers=True, reasons_in="the page")
    parts += ["In integers, against float and fake-quantized", text]
    if result.files is not None:
        parts += [f"ONNX files for {result.files.target}", _shortened(result.files_text)]
    left_out = ["stages and maps (no part of the network is named)", "mean average precision"]
    if not result.simulation.agreement:
        left_out.append("boxes (the model gives no function that makes them)")
    return [*parts, *result.notes, f"Left out: {', '.join(left_out)}"]


def _shortened(text: str) -> str:
    """The text with a few of the notes on float32 operations; a network may have hundreds."""
    lines = text.splitlines()
    notes = [index for index, line in enumerate(lines) if ": float32: " in line]
    if len(notes) <= _NOTES:
        return text
    dropped = set(notes[_NOTES:])
    lines[notes[_NOTES - 1]] += f"\n… and {len(dropped)} more operations in float32: summary.json"
    return "\n".join(line for index, line in enumerate(lines) if index not in dropped)
