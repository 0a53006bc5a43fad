"""Judging detections by the labels of a run's frames: what counts there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bevfusion_quant.datasets import range_origin
from bevfusion_quant.metrics import AccuracyTally, Bootstrap, DetectionRules

if TYPE_CHECKING:
    from bevfusion_quant.model import BEVFusionConfig
    from bevfusion_quant.ptq._batches import FrameBatches

__all__ = ["accuracy_tally"]


def accuracy_tally(
    config: BEVFusionConfig, batches: FrameBatches, bootstrap: Bootstrap | None = None
) -> AccuracyTally:
    """An empty tally for the models of `config` on these frames.

    Args:
        config: Sizes: the map's extent, the classes.
        batches: The frames; their data set says from where distances count and what is a scene.
        bootstrap: How intervals are found; `Bootstrap()` by default.
    """
    low_x, low_y, _, high_x, high_y, _ = config.lidar.point_cloud_range
    rules = DetectionRules(
        extent=(low_x, low_y, high_x, high_y), origin=range_origin(batches.dataset)
    )
    return AccuracyTally(config.head.classes, rules, bootstrap, batches.dataset)
