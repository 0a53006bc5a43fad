"""What trained weights find on frames that training never saw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from bev_data.metrics import Bootstrap, DetectionMeter, interval_of_mean_ap, metrics_of
from bevfusion.model import CONFIGS
from bevfusion_quant._errors import InputError
from bevfusion_quant.frames import FrameBatches

if TYPE_CHECKING:
    from bev_data.points import Frame
    from bevfusion.model import BEVFusion
    from bevfusion_quant.train._config import TrainConfig

__all__ = ["judge_detector"]


def judge_detector(
    model: BEVFusion, frames: Sequence[Frame], config: TrainConfig
) -> dict[str, Any]:
    """NuScenes' metrics of a float model, frame by frame in little memory.

    Args:
        model: In eval mode, on the CPU.
        frames: Labelled.
        config: Of the run.

    Returns:
        JSON: labels, mean_ap, interval (95 %, over frames), nds, and mean_ap by class; of a fused
        model also what it finds with grey pictures (mean_ap_without_pictures), which tells what
        the cameras add to the LiDAR in this very model.

    Raises:
        InputError: A frame has no labels.
    """
    sizes = CONFIGS[config.config]
    batches = FrameBatches(frames, sizes, model, config.cameras)
    meter, blind = (DetectionMeter(sizes.head.classes) for _ in range(2))
    fused = {"camera", "lidar"} <= set(model.parts)
    with torch.no_grad():
        for index in tqdm(range(len(frames)), desc="held out"):
            batch = batches[index]
            labels = batches.frame_labels(index)
            if labels is None:
                raise InputError(f"{batches.names[index][0]}: no labels to judge by")
            meter.add(model.head.decode(model(*batch))[0], labels)
            if fused and batch.images is not None:
                grey = batch._replace(images=torch.zeros_like(batch.images))
                blind.add(model.head.decode(model(*grey))[0], labels)
    interval = interval_of_mean_ap(meter, Bootstrap())
    metrics = metrics_of(meter, interval)
    without = {"mean_ap_without_pictures": metrics_of(blind).mean_ap} if fused else {}
    return {
        "count": metrics.frames,
        "labels": metrics.labels,
        "mean_ap": metrics.mean_ap,
        "interval": None if interval is None else [interval.low, interval.high],
        **without,
        "nds": metrics.nds,
        "classes": {row.name: row.mean_ap for row in metrics.classes},
    }
