"""Parts of a training: targets, assignment, losses, augmentation, compact frames, batches."""

from bevfusion.training._assign import assign, matching_cost
from bevfusion.training._compact import CompactFrame, compact
from bevfusion.training._head_loss import (
    HeadLoss,
    focal_loss,
    gaussian_focal_loss,
    head_loss,
    l1_loss,
)
from bevfusion.training._samples import Augmentation, Motion, make_batch, order_of
from bevfusion.training._schedule import one_cycle
from bevfusion.training._targets import (
    Targets,
    decode_boxes,
    encode_boxes,
    gaussian_radius,
    heatmap_target,
    targets_of,
)

__all__ = [
    "Augmentation",
    "CompactFrame",
    "HeadLoss",
    "Motion",
    "Targets",
    "assign",
    "compact",
    "decode_boxes",
    "encode_boxes",
    "focal_loss",
    "gaussian_focal_loss",
    "gaussian_radius",
    "head_loss",
    "heatmap_target",
    "l1_loss",
    "make_batch",
    "matching_cost",
    "one_cycle",
    "order_of",
    "targets_of",
]
