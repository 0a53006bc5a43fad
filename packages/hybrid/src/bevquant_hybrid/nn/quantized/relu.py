"""ReLUs of converted models: a quantized tensor keeps its scale in their forward."""

from __future__ import annotations

from torch import nn

__all__ = ["ReLU", "ReLU6"]


class ReLU(nn.ReLU):
    """max(q, 0)."""


class ReLU6(nn.ReLU6):
    """min(max(q, 0), 6/s)."""
