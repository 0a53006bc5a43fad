"""Detections of three models, counted over frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bevfusion_quant.measure import DetectionTally

if TYPE_CHECKING:
    from bev_data.metrics import AccuracyTally
    from bev_data.points import Labels
    from bevfusion.model import BEVFusion, BEVFusionConfig
    from bevfusion.model.head import Detections
    from bevfusion_quant.measure import AgreementRow, FoundRow

__all__ = ["Tallies"]


class Tallies:
    """Float against fake-quantized, and float against integers; empty without a head.

    Args:
        config: Sizes.
        model: Whose head decodes.
        accuracy: Is handed all three models' detections, as "float", "quantized" and "integer".

    Attributes:
        first: Float and fake-quantized detections of the first frame.
        float_detections: The float model's, frame by frame.
    """

    def __init__(
        self, config: BEVFusionConfig, model: BEVFusion, accuracy: AccuracyTally | None = None
    ) -> None:
        low_x, low_y, _, high_x, high_y, _ = config.lidar.point_cloud_range
        extent = (low_x, low_y, high_x, high_y)
        self._head = model.head if model.heads is not None else None
        self._fake = DetectionTally(config.head.classes, extent)
        self._integer = DetectionTally(config.head.classes, extent)
        self._accuracy = accuracy
        self.first: tuple[Detections, Detections] | None = None
        self.float_detections: list[Detections] = []

    def add(
        self, frame: tuple[int, str], wanted: Any, fake: Any, got: Any, labels: Labels | None
    ) -> None:
        """Count one frame, of this number and name, from the three models' outputs."""
        if self._head is None:
            return
        real, quantized, integers = (self._head.decode(o)[0] for o in (wanted, fake, got))
        self._fake.add(real, quantized, labels)
        self._integer.add(real, integers, labels)
        self.float_detections.append(real)
        if self._accuracy is not None:
            for name, found in (("float", real), ("quantized", quantized), ("integer", integers)):
                self._accuracy.add(name, *frame, found, labels)
        self.first = self.first or (real, quantized)

    def fake(self) -> tuple[list[AgreementRow], list[FoundRow]]:
        """Float against fake-quantized: how detections agree, which labels both find."""
        return self._rows(self._fake)

    def integer(self) -> tuple[list[AgreementRow], list[FoundRow]]:
        """Float against integers."""
        return self._rows(self._integer)

    def _rows(self, tally: DetectionTally) -> tuple[list[AgreementRow], list[FoundRow]]:
        return (tally.agreement(), tally.found()) if self.float_detections else ([], [])
