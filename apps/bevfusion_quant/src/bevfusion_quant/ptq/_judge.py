"""Everything that is measured on a float and a quantized model, whatever made them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bevfusion_quant.ptq._agreement import AgreementRow, DetectionTally, FoundRow
from bevfusion_quant.ptq._compare import LayerRow, compare_layers
from bevfusion_quant.ptq._quantizer_values import QuantizerRow, QuantizerValues, QuantizerWatch
from bevfusion_quant.ptq._stage_maps import StageMaps, StageRow

if TYPE_CHECKING:
    from bevfusion_quant.metrics import AccuracyTally
    from bevfusion_quant.model import BEVFusion, BEVFusionConfig
    from bevfusion_quant.model.head import Detections
    from bevfusion_quant.ptq._batches import FrameBatches
    from bevfusion_quant.ptq._clock import Clock

__all__ = ["Judgement", "judge"]


@dataclass(frozen=True, eq=False)
class Judgement:
    """How far the quantized model is from the float one.

    Attributes:
        layers: The layer table, pooled over all frames.
        stages: Maps of the first frame and figures over all frames, stage by stage.
        values: What each quantizer saw on the first frame.
        agreement: How well the detections agree; empty without a head.
        found: How many labelled objects both find; empty without a head or labels.
        detections: Float and quantized ones of the first frame; None without a head.
        float_detections: The float model's, frame by frame; empty without a head.
        wanted: The float model's output for the first frame.
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
        """What each quantizer saw, as one line."""
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


def judge(
    float_model: BEVFusion,
    quantized_model: BEVFusion,
    batches: FrameBatches,
    config: BEVFusionConfig,
    clock: Clock,
    accuracy: AccuracyTally | None = None,
) -> Judgement:
    """Compare layers, stages and detections over all batches; watch the quantizers on the first.

    `accuracy` is handed both models' detections, as "float" and "quantized".
    """
    low_x, low_y, _, high_x, high_y, _ = config.lidar.point_cloud_range
    tally = DetectionTally(config.head.classes, (low_x, low_y, high_x, high_y))
    first: list[tuple[Detections, Detections]] = []
    float_detections: list[Detections] = []

    def count(index: int, wanted: Any, got: Any) -> None:
        found, quantized = (float_model.head.decode(output)[0] for output in (wanted, got))
        tally.add(found, quantized, batches.frame_labels(index))
        float_detections.append(found)
        if accuracy is not None:
            name, there = batches.names[index][0], batches.frame_labels(index)
            accuracy.add("float", index, name, found, there)
            accuracy.add("quantized", index, name, quantized, there)
        if index == 0:
            first.append((found, quantized))

    has_head = "head" in float_model.parts
    with clock.step("compare"):
        watch = QuantizerWatch(quantized_model)
        rows, stages, wanted, _ = compare_layers(
            float_model, quantized_model, batches, count if has_head else None, watch
        )
    with clock.step("watch quantizers"), watch.counting():
        quantized_model(*batches[0])
    agreement = tally.agreement() if has_head else []
    return Judgement(
        rows,
        stages,
        watch.values(),
        agreement,
        tally.found(),
        first[0] if first else None,
        float_detections,
        wanted,
    )
