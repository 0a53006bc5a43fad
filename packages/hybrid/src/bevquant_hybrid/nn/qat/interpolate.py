"""Resizing of models that train quantized."""

from __future__ import annotations

from bevquant_hybrid.nn._functions import Interpolate as FloatInterpolate
from bevquant_hybrid.nn.qat._base import KeepsScale

__all__ = ["Interpolate"]


class Interpolate(KeepsScale, FloatInterpolate):
    """`bevquant_hybrid.nn.Interpolate`, with the scale of its input."""
