"""Average pooling that trains quantized; pooling by maximum keeps its input's scale."""

from __future__ import annotations

from torch import nn

from bevquant_hybrid.nn.qat._base import OutputQuantized

__all__ = ["AdaptiveAvgPool2d", "AvgPool2d"]


class AvgPool2d(OutputQuantized, nn.AvgPool2d):
    """Average over windows, with a scale of its own."""


class AdaptiveAvgPool2d(OutputQuantized, nn.AdaptiveAvgPool2d):
    """Average over as many windows as the output has pixels, with a scale of its own."""
