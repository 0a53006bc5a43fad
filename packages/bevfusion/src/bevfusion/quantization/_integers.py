"""The detector in integers: run on frames beside float, stage by stage; parts that stay float."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from torch import nn

from bev_data.metrics import AccuracyAccumulator, AgreementRow, FoundRow
from bevfusion.centerpoint import CenterPoint
from bevfusion.evaluation import FrameBatches, ModelAccumulators, detections_of, detections_record
from bevfusion.model import Detector
from bevfusion.model.head import Detections
from bevfusion.quantization._evaluate import QuantizationEvaluation
from bevfusion.quantization._stage_maps import STAGE_TITLES
from bevquant_int8sim import FloatFallback, IntegerModel, LayerComparison, LayerRow, LayerTable
from bevquant_quantizers.ranks import Shards, in_order
from bevquant_sparse import is_sparse_conv

# Stage → the module paths that belong to it.
_STAGES = {
    "neck": ("encoders.camera.backbone", "encoders.camera.neck"),
    "camera": ("encoders.camera.vtransform",),
    "lidar": ("encoders.lidar", *CenterPoint.part_paths["lidar"]),
    "fuser": ("fuser",),
    "decoder": ("decoder", *CenterPoint.part_paths["decoder"]),
    "head": ("heads.object.shared_conv", "heads.object.heatmap_head", "pts_bbox_head"),
}
# Of which part of the model a stage is; the head's stage ends before it chooses its queries.
_PARTS = {"neck": "camera"}


@dataclass(frozen=True)
class IntegerStage:
    """One stage: error of its last layer, and the largest difference in it.

    Attributes:
        stage: Its name.
        title: Its title.
        layer: Its last step.
        integers: Number of its steps in integers.
        floats: Number of its steps in float.
        fake_sqnr_db: SQNR of the last step's output, fake-quantized against float; None where
            equal.
        integer_sqnr_db: The same, integers against float.
        max_steps: Largest difference of integer and fake-quantized results in the stage, in steps
            of the layer's output; None without integer outputs.
        mean_steps: Mean absolute difference at the last integer output.
        forced_max_steps: Largest difference of a layer in the stage on the same inputs.
    """

    stage: str
    title: str
    layer: str
    integers: int
    floats: int
    fake_sqnr_db: float | None
    integer_sqnr_db: float | None
    max_steps: int | None
    mean_steps: float | None
    forced_max_steps: int | None


def in_integers(row: LayerRow) -> bool:
    """Whether a step computes in integers. A last layer does although its output is float.

    Only layers have accumulators.
    """
    return row.form != "float" or row.peak_bits is not None


def integer_stages(layers: Sequence[LayerRow], parts: Sequence[str]) -> tuple[IntegerStage, ...]:
    """A line for every stage of the parts that the model has."""
    return tuple(
        _stage(stage, STAGE_TITLES[stage], rows)
        for stage, paths in _STAGES.items()
        if _PARTS.get(stage, stage) in parts
        and (rows := [row for row in layers if any(lies_below(row.path, path) for path in paths)])
    )


def lies_below(path: str, part: str) -> bool:
    """Whether a module's path is `part`, or lies below it."""
    return path == part or path.startswith(f"{part}.")


def _stage(stage: str, title: str, rows: Sequence[LayerRow]) -> IntegerStage:
    exact = [row for row in rows if row.max_steps is not None]
    last = rows[-1]
    computed = sum(map(in_integers, rows))
    return IntegerStage(
        stage,
        title,
        last.path,
        computed,
        len(rows) - computed,
        last.fake_sqnr_db,
        last.integer_sqnr_db,
        max((row.max_steps or 0 for row in exact), default=None),
        exact[-1].mean_steps if exact else None,
        max((row.forced_max_steps or 0 for row in exact), default=None),
    )


@dataclass(frozen=True)
class SavedPart:
    """An integer model on disk.

    Attributes:
        part: Path of the module, or "model" for all of it.
        folder: Folder for `IntegerModel.load`, relative to the run's folder; empty if not saved.
        reason: Reason why it is not saved.
    """

    part: str
    folder: str
    reason: str = ""


@dataclass(frozen=True)
class FloatPart:
    """A part in float: the module, its class or the function's name, and the reason.

    `share` is its share of the model's operations, 0 to 1; None if not counted.
    """

    path: str
    what: str
    reason: str
    share: float | None = None


@dataclass(frozen=True, eq=False)
class Simulation:
    """Result of running in integers.

    Attributes:
        layers: One row per computing step, in the order of execution.
        stages: The same per stage of the model.
        islands: Parts in float, with reasons.
        agreement: Detections of the integer model against the float model; empty without a head.
        found: Labelled objects that both find; empty without a head or labels.
        backend: The kernels and their instruction set.
        frame_seconds: Seconds of the integer model alone, by frame; the first warms up.
        saved: The integer model in the run folder, or the reason why it is missing.
        detections: Detections of the integer model on the first frame; None without a head.
        layer_frames: Number of frames, from the first, on which layers were compared; None for all.
        operations: Operations of one frame: multiply-accumulates, and values that other steps
            compute.
        integer_share: Share of `operations` in integers, 0 to 1.
    """

    layers: tuple[LayerRow, ...]
    stages: tuple[IntegerStage, ...]
    islands: tuple[FloatPart, ...]
    agreement: tuple[AgreementRow, ...]
    found: tuple[FoundRow, ...]
    backend: str
    frame_seconds: tuple[float, ...]
    saved: tuple[SavedPart, ...]
    detections: Detections | None = None
    layer_frames: int | None = None
    operations: int = 0
    integer_share: float = 0.0

    @property
    def compared_on(self) -> str:
        """The frames of the layer comparison, as text; empty for all."""
        frames = len(self.frame_seconds)
        if self.layer_frames is None or self.layer_frames >= frames:
            return ""
        first = "the first" if self.layer_frames == 1 else f"the first {self.layer_frames}"
        return f"Operations were compared on {first} of {frames} frames, boxes on all."

    @property
    def _table(self) -> LayerTable:
        return LayerTable(self.layers)

    @property
    def first_departure(self) -> LayerRow | None:
        """The first layer whose integers differ from the fake-quantized result by over a step."""
        return self._table.first_departure

    @property
    def wrong(self) -> tuple[LayerRow, ...]:
        """Layers more than one step apart on the same inputs, without a known reason."""
        return self._table.wrong

    @property
    def explained(self) -> tuple[LayerRow, ...]:
        """Layers more than one step apart on the same inputs, with a reason in their row."""
        return tuple(r for r in self.layers if (r.forced_max_steps or 0) > 1 and r.why)

    def summary(self) -> dict[str, Any]:
        """All results, for summary.json."""
        first = self.first_departure
        return {
            "backend": self.backend,
            "first_departure": None if first is None else first.path,
            "wrong": [row.path for row in self.wrong],
            "explained": [row.path for row in self.explained],
            "frame_seconds": self.frame_seconds,
            "layer_frames": self.layer_frames,
            "stages": self.stages,
            "layers": self.layers,
            "islands": self.islands,
            "agreement": self.agreement,
            "labels_found": self.found,
            "saved": self.saved,
            "operations": self.operations,
            "integer_share": self.integer_share,
        }


class StageSummary(msgspec.Struct):
    """Error of one part of the model against float, read from the JSON of a summary."""

    stage: str
    title: str
    sqnr_db: float | None = None
    fake_sqnr_db: float | None = None
    integer_sqnr_db: float | None = None


class IntegerLayerSummary(msgspec.Struct):
    """Largest error of an integer step, read from the JSON of a summary."""

    max_steps: float | None = None


class SimulationSummary(msgspec.Struct):
    """Fields of `Simulation.summary`, read from JSON."""

    wrong: list[str]
    explained: list[str]
    layers: list[IntegerLayerSummary]
    stages: list[StageSummary]


def simulate_detector(
    model: IntegerModel,
    comparison: LayerComparison,
    quantized_model: Detector,
    batches: FrameBatches,
    evaluation: QuantizationEvaluation,
    *,
    backend: str = "",
    reasons: Mapping[str, str] | None = None,
    accuracy: AccuracyAccumulator | None = None,
    shards: Shards | None = None,
) -> Simulation:
    """Run the integer model on the frames; several ranks share them.

    Args:
        model: Result of `bevquant_int8sim.simulate`.
        comparison: Its comparison with the float model, fed by `evaluate_quantized`.
        quantized_model: The calibrated model.
        batches: At least one.
        evaluation: Evaluation of the float and the quantized model on the same batches.
        backend: Its kernels, as text.
        reasons: Reasons why parts stay float, by name; "excluded" is that of single layers.
        accuracy: Receives the integer model's detections as "integer".
        shards: Storage of finished results while several ranks work.
    """
    accumulators, seconds = ModelAccumulators(batches.sizes), []

    def run(index: int) -> dict[str, Any]:
        batch = batches[index]
        start = time.perf_counter()
        output = model(*batch)
        record = {"seconds": np.array(time.perf_counter() - start)}
        if evaluation.float_detections:
            record |= detections_record("integer", batches.boxes(quantized_model, output, batch))
        return record

    for index, record in in_order("integers", len(batches), run, shards):
        seconds.append(round(float(record["seconds"]), 3))
        if evaluation.float_detections:  # at once: outputs of many frames are too large
            found = {"float": evaluation.float_detections[index]}
            found["integer"] = detections_of("integer", record)
            name, labels = batches.names[index][0], batches.frame_labels(index)
            accumulators.add(index, name, found, labels)
            if accuracy is not None:
                accuracy.add("integer", index, name, found["integer"], labels)
    agreement, both = accumulators.rows("integer")
    layers = comparison.table().rows
    return Simulation(
        layers,
        integer_stages(layers, quantized_model.parts),
        float_parts(model.float_fallbacks, quantized_model, reasons or {}),
        tuple(agreement),
        tuple(both),
        backend,
        tuple(seconds),
        (),
        accumulators.first.get("integer"),
        comparison.batches,
        model.operations,
        model.integer_share,
    )


def float_parts(
    islands: Sequence[FloatFallback], model: Detector, reasons: Mapping[str, str]
) -> tuple[FloatPart, ...]:
    """The float fallbacks, each with its root reason, by part or "excluded"."""
    left = {path: why for part, why in reasons.items() for path in model.part_paths.get(part, ())}
    left = {**model.kept_in_float, **left}
    known = dict(model.named_modules())
    found = []
    for fallback in islands:
        # For a part without quantizers this is the choice not to quantize it; for a convolution or
        # linear layer in a quantized part, its exclusion.
        reason = fallback.reason
        part = next((path for path in left if lies_below(fallback.path, path)), None)
        if part is not None:
            reason = left[part]
        elif _could_be_quantized(known.get(fallback.path), fallback.what):
            reason = reasons.get("excluded", "it was left without quantizers")
        found.append(FloatPart(fallback.path, fallback.what, reason, fallback.share))
    return tuple(found)


def _could_be_quantized(module: nn.Module | None, what: str) -> bool:
    """Whether the float fallback is the module itself, of a kind that gets quantizers."""
    if module is None or hasattr(module, "_input_quantizer"):
        return False
    kinds = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
    return type(module).__name__ == what and (isinstance(module, kinds) or is_sparse_conv(module))
