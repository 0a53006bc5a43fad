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
from bevfusion_quant.train._checkpoint import read_checkpoint, restore, write_checkpoint
from bevfusion_quant.train._config import TRAINED_BRANCHES, TrainConfig
from bevfusion_quant.train._loop import stop_on_signals
from bevfusion_quant.train._prepare import prepare_frames
from bevfusion_quant.train._run import TrainResult, run_train
from bevfusion_quant.train._split import FrameSource, held_out, training_frames

__all__ = [
    "TRAINED_BRANCHES",
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
    "prepare_frames",
    "read_checkpoint",
    "restore",
    "run_train",
    "stop_on_signals",
    "targets_of",
    "training_frames",
    "write_checkpoint",
]
