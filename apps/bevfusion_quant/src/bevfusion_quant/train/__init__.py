"""Training a detector: targets, losses, prepared frames, and runs that can be killed."""

from bevfusion.training import (
    Augmentation,
    HeadLoss,
    Motion,
    Targets,
    assign,
    encode_boxes,
    focal_loss,
    gaussian_focal_loss,
    gaussian_radius,
    head_loss,
    heatmap_target,
    l1_loss,
    matching_cost,
    targets_of,
)
from bevfusion_quant.train._config import TrainConfig
from bevfusion_quant.train._run import TrainResult, run_train
from bevfusion_quant.train._split import FrameSource, held_out, training_frames

__all__ = [
    "Augmentation",
    "FrameSource",
    "HeadLoss",
    "Motion",
    "Targets",
    "TrainConfig",
    "TrainResult",
    "assign",
    "encode_boxes",
    "focal_loss",
    "gaussian_focal_loss",
    "gaussian_radius",
    "head_loss",
    "heatmap_target",
    "held_out",
    "l1_loss",
    "matching_cost",
    "run_train",
    "targets_of",
    "training_frames",
]
