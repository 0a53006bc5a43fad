"""Parts of a training: targets, losses, augmentation, prepared frames, steps and checkpoints."""

from bevfusion.training._assign import assign, matching_cost
from bevfusion.training._checkpoint import (
    CHECKPOINT,
    Checkpoint,
    Trainer,
    begun_before,
    check_identity,
    identity_of,
    read_checkpoint,
    restore,
    take_steps,
    write_checkpoint,
)
from bevfusion.training._compact import CompactFrame, compact
from bevfusion.training._detector import RARE, DetectorTrainer, stored_weights, untrained_model
from bevfusion.training._head_loss import (
    BOX_WEIGHT,
    TRANSFUSION_OBJECTIVE,
    HeadLoss,
    Objective,
    code_weights,
    focal_loss,
    gaussian_focal_loss,
    head_loss,
    l1_loss,
)
from bevfusion.training._loop import in_parts, losses_table, one_cycle, run_steps, stop_on_signals
from bevfusion.training._prepare import FrameForm, FrameSource, PreparedFrames, prepare_frames
from bevfusion.training._samples import Augmentation, Motion, make_batch, order_of
from bevfusion.training._targets import (
    Targets,
    decode_boxes,
    encode_boxes,
    gaussian_radius,
    heatmap_target,
    targets_of,
)

__all__ = [
    "BOX_WEIGHT",
    "CHECKPOINT",
    "RARE",
    "TRANSFUSION_OBJECTIVE",
    "Augmentation",
    "Checkpoint",
    "CompactFrame",
    "DetectorTrainer",
    "FrameForm",
    "FrameSource",
    "HeadLoss",
    "Motion",
    "Objective",
    "PreparedFrames",
    "Targets",
    "Trainer",
    "assign",
    "begun_before",
    "check_identity",
    "code_weights",
    "compact",
    "decode_boxes",
    "encode_boxes",
    "focal_loss",
    "gaussian_focal_loss",
    "gaussian_radius",
    "head_loss",
    "heatmap_target",
    "identity_of",
    "in_parts",
    "l1_loss",
    "losses_table",
    "make_batch",
    "matching_cost",
    "one_cycle",
    "order_of",
    "prepare_frames",
    "read_checkpoint",
    "restore",
    "run_steps",
    "stop_on_signals",
    "stored_weights",
    "take_steps",
    "targets_of",
    "untrained_model",
    "write_checkpoint",
]
