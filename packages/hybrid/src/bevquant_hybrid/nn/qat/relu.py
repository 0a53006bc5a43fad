"""ReLUs of models that train quantized; behind a convolution they are fused into it."""

from __future__ import annotations

from torch import nn

from bevquant_hybrid.nn.qat._base import KeepsScale

__all__ = ["ReLU", "ReLU6"]


class ReLU(KeepsScale, nn.ReLU):
    """max(x, 0), with the scale of its input."""


class ReLU6(KeepsScale, nn.ReLU6):
    """min(max(x, 0), 6), with the scale of its input."""
