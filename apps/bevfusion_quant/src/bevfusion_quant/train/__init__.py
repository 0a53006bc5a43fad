"""Training a detector: targets, losses, prepared frames, and runs that can be killed."""

from bevfusion_quant.train._assign import assign, matching_cost
from bevfusion_quant.train._augment import Augmentation, Motion
from bevfusion_quant.train._command import train_from_options, train_text
from bevfusion_quant.train._config import TrainConfig
from bevfusion_quant.train._head_loss import HeadLoss, head_loss
from bevfusion_quant.train._heatmap import gaussian_radius, heatmap_target
from bevfusion_quant.train._losses import focal_loss, gaussian_focal_loss, l1_loss
from bevfusion_quant.train._run import TrainResult, run_train
from bevfusion_quant.train._split import FrameSource, held_out, training_frames
from bevfusion_quant.train._targets import Targets, encode_boxes, targets_of

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
    "train_from_options",
    "train_text",
    "training_frames",
]
