"""Mean average precision as the score of a sensitivity measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bev_data.datasets import labelled_region, range_origin
from bev_data.metrics import DetectionMeter, DetectionRules, metrics_of
from bevfusion_quant._errors import InputError

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion, BEVFusionConfig
    from bevfusion.model.head import Detections
    from bevfusion_quant.frames import FrameBatches
    from bevfusion_quant.ranks import Shards

__all__ = ["MeanAp"]


class MeanAp:
    """nuScenes' mean average precision over the labelled frames, in points of 100.

    Called with a batch's outputs it answers the detections; `reduce` judges those of all batches,
    in order. Frames without labels are passed over.

    Args:
        model: Whose head decodes.
        batches: The frames, for their labels.
        config: Sizes.
        shards: Keeps what is finished while several ranks share the frames.

    Raises:
        InputError: The model has no head, or no frame has labels.
    """

    __name__ = "mAP"  # what the table calls it

    def __init__(
        self,
        model: BEVFusion,
        batches: FrameBatches,
        config: BEVFusionConfig,
        shards: Shards | None = None,
    ) -> None:
        if "head" not in model.parts:
            raise InputError(
                f"--metric mAP: the run's model is {' and '.join(model.parts)} alone and finds no "
                "boxes: measure with --metric sqnr"
            )
        if all(batches.frame_labels(index) is None for index in range(len(batches))):
            raise InputError(
                "--metric mAP: none of the frames has labels: give frames that have (street, "
                "pandaset, kitti, nuscenes), or measure with --metric sqnr"
            )
        self._head: Any = model.head
        self._batches, self._shards = batches, shards
        self._classes = config.head.classes
        low_x, low_y, _, high_x, high_y, _ = config.lidar.point_cloud_range
        self._rules = DetectionRules(
            extent=(low_x, low_y, high_x, high_y), origin=range_origin(batches.dataset)
        )
        self._region = labelled_region(batches.dataset)

    def __call__(self, output: Any, batch: object) -> Detections:
        """Boxes of one frame."""
        (found,) = self._head.decode(output)
        detections: Detections = found
        return detections

    def reduce(self, found: Sequence[Detections]) -> float:
        """Judge the boxes of all frames.

        Raises:
            InputError: No label counts.
        """
        self._batches.share_notes(self._shards)
        meter = DetectionMeter(self._classes, self._rules)
        for index, detections in enumerate(found):
            labels = self._batches.frame_labels(index)
            if labels is not None:
                meter.add(detections, labels, region=self._region)
        mean_ap = metrics_of(meter).mean_ap
        if mean_ap is None:
            raise InputError(
                "--metric mAP: no label of these frames counts (too far away, or without a point): "
                "give other frames, or more of them"
            )
        return 100 * mean_ap
