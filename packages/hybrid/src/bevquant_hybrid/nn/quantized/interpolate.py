"""Resizing of converted models: a quantized tensor keeps its scale in its forward."""

from __future__ import annotations

from bevquant_hybrid.nn._functions import Interpolate as FloatInterpolate

__all__ = ["Interpolate"]


class Interpolate(FloatInterpolate):
    """`bevquant_hybrid.nn.Interpolate` of integers."""
