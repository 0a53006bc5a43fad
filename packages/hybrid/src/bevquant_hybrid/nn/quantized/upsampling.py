"""Torch's upsampling modules in converted models: a quantized tensor keeps its scale."""

from __future__ import annotations

from torch import nn

__all__ = ["Upsample", "UpsamplingBilinear2d", "UpsamplingNearest2d"]


class Upsample(nn.Upsample):
    """Resizing of integers."""


class UpsamplingBilinear2d(nn.UpsamplingBilinear2d):
    """Bilinear resizing of integers, with aligned corners."""


class UpsamplingNearest2d(nn.UpsamplingNearest2d):
    """Resizing of integers by the nearest one."""
