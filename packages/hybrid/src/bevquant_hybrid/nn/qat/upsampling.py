"""Torch's upsampling modules in models that train quantized."""

from __future__ import annotations

from torch import nn

from bevquant_hybrid.nn.qat._base import KeepsScale

__all__ = ["Upsample", "UpsamplingBilinear2d", "UpsamplingNearest2d"]


class Upsample(KeepsScale, nn.Upsample):
    """Resizing, with the scale of its input."""


class UpsamplingBilinear2d(KeepsScale, nn.UpsamplingBilinear2d):
    """Bilinear resizing with aligned corners, with the scale of its input."""


class UpsamplingNearest2d(KeepsScale, nn.UpsamplingNearest2d):
    """Resizing by the nearest value, with the scale of its input."""
