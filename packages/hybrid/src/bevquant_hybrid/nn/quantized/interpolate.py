"""Resizing of converted models: a quantized tensor keeps its scale in its forward."""

from __future__ import annotations

from bevquant_hybrid.nn import _functions
from bevquant_hybrid.nn.qat._base import derived

Interpolate = derived(_functions.Interpolate, _functions.Interpolate, __name__)
