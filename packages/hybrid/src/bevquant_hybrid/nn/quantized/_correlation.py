"""Correlation of integers."""

from __future__ import annotations

from bevquant_hybrid._correlate import correlate_integers
from bevquant_hybrid.nn._correlation import channels_of
from bevquant_hybrid.nn.qat import correlation as qat
from bevquant_hybrid.nn.quantized._base import FixedPoint, integers
from bevquant_hybrid.qtensor import QTensor

__all__ = ["Correlation"]


class Correlation(FixedPoint):
    """round(Σxy·s_x·s_y / (K²·C·s)) of exact sums, which must fit int32."""

    def __init__(self, source: qat.Correlation, rounding: str) -> None:
        super().__init__(source, rounding)
        self.settings = source.settings
        self.kernel_size = source.kernel_size
        self.max_displacement, self.pad_size = source.max_displacement, source.pad_size
        self.stride1, self.stride2 = source.stride1, source.stride2

    def forward(self, data1: QTensor, data2: QTensor) -> QTensor:
        """Compare integers."""
        x, y = integers(self, data1), integers(self, data2, "second input")
        channels = channels_of(f"{self.qualified_name} (Correlation)", x, y)
        acc = correlate_integers(x.int_repr(), y.int_repr(), *self.settings)
        size = self.kernel_size**2 * channels
        return self.requantized(acc, x.scale.double() * y.scale.double() / size)
