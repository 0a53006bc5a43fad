"""Correlation that trains quantized."""

from __future__ import annotations

from torch import Tensor

from bevquant_hybrid.nn._correlation import Correlation as FloatCorrelation
from bevquant_hybrid.nn.qat._base import OutputQuantized, quantized_input, quantized_output

__all__ = ["Correlation"]


class Correlation(OutputQuantized, FloatCorrelation):
    """Correlation of two quantized maps, with a scale of its own."""

    def forward(self, data1: Tensor, data2: Tensor) -> Tensor:  # type: ignore[override]
        """Compare, and quantize the result."""
        values = quantized_input(self, data1), quantized_input(self, data2, "second input")
        return quantized_output(self, FloatCorrelation.forward(self, *values))
