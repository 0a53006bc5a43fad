"""Fold a batch norm into the layer before it, whatever mode the model is in."""

from __future__ import annotations

import copy

from torch import nn

from bevquant_fusion import fuse_conv_bn

__all__ = ["fold"]


def fold(anchor: nn.Module, bn: nn.Module) -> nn.Module:
    """Return a copy of the layer with the batch norm's running statistics folded in.

    Raises:
        ValueError: The two do not fit, or there are no running statistics.
    """
    settled = copy.copy(bn)
    settled.training = False
    made = fuse_conv_bn(anchor, settled)
    made.train(anchor.training)
    for mark in ("qconfig", "preserve_qat_mode"):
        if mark in anchor.__dict__:
            setattr(made, mark, anchor.__dict__[mark])
    return made
