"""All measurements of a float and a quantized model, and their tables for the screen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import bevquant_int8sim
import bevquant_qnn
from bev_data.metrics import AccuracyAccumulator, AgreementRow, FoundRow, record_table
from bevfusion.evaluation import (
    FrameBatches,
    ModelAccumulators,
    detections_of,
    detections_record,
    note_of,
    note_record,
)
from bevfusion.model import Batch, Detector
from bevfusion.model.head import Detections
from bevfusion.quantization._stage_maps import StageMaps, StageRow, stage_probes, whole_output
from bevquant_qnn import LayerComparison, LayerRow
from bevquant_quantizers import QuantizerRow, QuantizerValues, TensorQuantizer, watching_quantizers
from bevquant_quantizers.ranks import Record, Shards, in_order


def compare_layers(
    float_model: Detector,
    quantized_model: Detector,
    batches: Iterable[Batch],
) -> DetectorComparison:
    """`bevquant_qnn.compare_layers` of a detector, with its stages.

    Args:
        float_model: The folded float model.
        quantized_model: Its calibrated quantized model.
        batches: At least one; every batch runs through both models.

    Returns:
        Rows pooled over all batches. The row `output` is the model's bird's-eye view, or the head's
        heatmap.
    """
    comparison = DetectorComparison(float_model, quantized_model)
    with comparison.watching():
        for index, batch in enumerate(batches):
            comparison.add(comparison.run(index, batch)[0])
    return comparison


def _quantizes_choosers(model: Detector) -> bool:
    """Whether a module that chooses objects has quantized layers, which are then compared."""
    built = dict(model.named_modules())
    # Models in other code do not name the modules that choose: the whole model counts.
    parts = [built[path] for path in model.chooses if path in built] or [model]
    return any(isinstance(m, TensorQuantizer) for part in parts for m in part.modules())


class DetectorComparison:
    """`compare_layers` frame by frame: a frame's result is a record, and records are added up.

    Args:
        float_model: The folded float model.
        quantized_model: Its calibrated quantized model.
        integers: Comparison of both with the integer model, which runs beside them and reads the
            outputs of their layers.
        integer_frames: Number of frames, from the first, on which it runs; None for all.

    Attributes:
        quantizers: Values at each quantizer in the first batch; empty in a process that did not run
            it.
        wanted: The float model's output for the first batch; None in such a process.
        got: The quantized model's.
    """

    def __init__(
        self,
        float_model: Detector,
        quantized_model: Detector,
        integers: bevquant_int8sim.LayerComparison | None = None,
        integer_frames: int | None = None,
    ) -> None:
        self._integer_frames = integer_frames
        self.quantizers: list[QuantizerValues] = []
        self._quantized, self._stages = quantized_model, stage_probes(quantized_model)
        self._layers = LayerComparison(
            float_model,
            quantized_model,
            output=whole_output,
            watch={stage.path: stage.compare for stage in self._stages},
            beside=integers,
            match_choices=_quantizes_choosers(quantized_model),
        )
        self.watching = self._layers.watching
        self._kind = ""
        self.wanted = self.got = None

    def run(self, index: int, batch: Batch) -> tuple[dict[str, Any], Any, Any]:
        """Run both models on a batch; returns a record of arrays, and the two outputs."""
        first = index == 0
        for stage in self._stages:
            stage.start(draws=first)
        with ExitStack() as stack:
            if first:
                self.quantizers = stack.enter_context(watching_quantizers(self._quantized))
            some = self._integer_frames
            alone = some is not None and index >= some
            record, wanted, got = self._layers.run(batch, alone=alone)
        if first:
            self.wanted, self.got = wanted, got
        record |= {
            "stages.sums": np.array([s.frame_sums.as_sums() for s in self._stages], np.float64),
            "stages.channels": np.array([s.channels for s in self._stages], np.int64),
            "heatmap": np.array(isinstance(wanted, dict)),
        }
        return record, wanted, got

    def add(self, record: Record) -> None:
        """Add a frame's record; frames come in their order."""
        self._layers.add(record)
        for stage, sums, channels in zip(
            self._stages, record["stages.sums"], record["stages.channels"], strict=True
        ):
            stage.add_sums(sums, int(channels))
        self._kind = "heatmap" if record["heatmap"] else "bird's-eye view"
        if not self._stages:  # of a network in other code
            self._kind = "first tensor"

    @property
    def rows(self) -> list[LayerRow]:
        """Rows over the added frames, the last one of the model's output."""
        *rows, output = self._layers.rows()
        return [*rows, replace(output, kind=self._kind)]

    @property
    def stages(self) -> list[StageMaps]:
        """Each stage over the added frames, with maps of the first."""
        return [stage.result() for stage in self._stages]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.rows, self.stages, self.wanted, self.got))


Comparison = DetectorComparison


@dataclass(frozen=True, eq=False)
class QuantizationEvaluation:
    """Distance of the quantized model from the float one.

    Attributes:
        layers: The layer table, pooled over all frames.
        stages: Maps of the first frame and figures over all frames, by stage.
        values: Values at each quantizer on the first frame; on the first rank only.
        agreement: Agreement of the detections; empty without a head.
        found: Labelled objects that both find; empty without a head or labels.
        detections: Float and quantized ones of the first frame; None without a head.
        float_detections: The float model's, frame by frame; empty without a head.
        wanted: The float model's output for the first frame; on the first rank only.
    """

    layers: list[LayerRow]
    stages: list[StageMaps]
    values: list[QuantizerValues]
    agreement: list[AgreementRow]
    found: list[FoundRow]
    detections: tuple[Detections, Detections] | None
    float_detections: list[Detections]
    wanted: Any

    @property
    def quantizers(self) -> list[QuantizerRow]:
        """Values at each quantizer, as one line."""
        return [QuantizerRow.of(values) for values in self.values]

    @property
    def stage_rows(self) -> list[StageRow]:
        """The stages without their maps."""
        return [stage.row for stage in self.stages]

    def summary(self) -> dict[str, Any]:
        """The tables, for summary.json."""
        return {
            "layers": self.layers,
            "stages": self.stage_rows,
            "agreement": self.agreement,
            "labels_found": self.found,
            "quantizers": self.quantizers,
        }


_MODELS = ("float", "quantized")


def evaluate_quantized(
    float_model: Detector,
    quantized_model: Detector,
    batches: FrameBatches,
    *,
    accuracy: AccuracyAccumulator | None = None,
    shards: Shards | None = None,
    integers: bevquant_int8sim.LayerComparison | None = None,
    integer_frames: int | None = None,
) -> QuantizationEvaluation:
    """Compare layers, stages and detections over all batches; observe quantizers on the first.

    Several ranks share the batches. Each gets the tables of a single process, bit for bit.

    Args:
        float_model: The folded float model.
        quantized_model: Its calibrated quantized model.
        batches: At least one.
        accuracy: Receives both models' detections as "float" and "quantized".
        shards: Storage of finished results while several ranks work.
        integers: Comparison of the two models with the integer one, run on the same batches.
        integer_frames: Number of frames, from the first, on which it runs; None for all.
    """
    accumulators = ModelAccumulators(batches.sizes, accuracy)
    has_boxes = float_model.finds_boxes
    comparison = DetectorComparison(float_model, quantized_model, integers, integer_frames)

    def run(index: int) -> dict[str, Any]:
        batch = batches[index]
        record, *outputs = comparison.run(index, batch)
        record |= note_record(batches.note(index))
        if has_boxes:
            for who, output in zip(_MODELS, outputs, strict=True):
                record |= detections_record(who, batches.boxes(float_model, output, batch))
        return record

    with comparison.watching():
        for index, record in in_order("compare", len(batches), run, shards, anew=1):
            comparison.add(record)
            note = note_of(record)
            batches.learn(index, note)
            if has_boxes:
                found = {who: detections_of(who, record) for who in _MODELS}
                accumulators.add(index, note.name, found, note.labels)
    rows, stages, wanted, _ = comparison
    agreement, labels_found = accumulators.rows("quantized")
    first = accumulators.first
    return QuantizationEvaluation(
        rows,
        stages,
        comparison.quantizers,
        agreement,
        labels_found,
        (first["float"], first["quantized"]) if first else None,
        accumulators.float_detections,
        wanted,
    )


def layer_table(rows: Sequence[LayerRow]) -> str:
    """The per-layer table as text of at most 100 columns."""
    named = [replace(row, layer=name) for row, name in zip(rows, short_names(rows), strict=True)]
    return bevquant_qnn.layer_table(named)


def stage_table(rows: Sequence[StageRow]) -> str:
    """One line for each stage."""
    columns = {
        "stage": "{title}",
        "channels": "{channels}",
        "SQNR dB": "{sqnr_db:.1f}",
        "cosine": "{cosine:.6f}",
    }
    return record_table(rows, columns)


def short_names(rows: Sequence[LayerRow]) -> list[str]:
    """Layer names without their common beginning."""
    paths = [row.layer for row in rows if row.layer != "output"]
    lidar = "encoders.lidar.backbone."
    prefix = lidar if all(path.startswith(lidar) for path in paths) else ""
    return [
        f"output ({row.kind})" if row.layer == "output" else short_path(row.layer, prefix)
        for row in rows
    ]


def short_path(path: str, prefix: str = "") -> str:
    """A layer's path without the name of the largest group.

    Example:
        >>> short_path("encoders.lidar.backbone"), short_path("network.neck.0")
        ('lidar.backbone', 'neck.0')
    """
    for start in filter(None, (prefix, "encoders.", "network.")):
        if path.startswith(start):
            return path.removeprefix(start)
    return path
