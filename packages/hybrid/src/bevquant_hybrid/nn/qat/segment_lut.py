"""Elementwise functions, which a BPU looks up in tables."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from bevquant_graph import layer_class
from bevquant_hybrid.nn.qat._base import (
    OutputQuantized,
    module_path,
    quantized_input,
    quantized_output,
    remember_qconfig,
    take_over,
)


class SegmentLUT(OutputQuantized):
    """Apply a float function to the values and quantize the result.

    Attributes:
        function: The float module: Sigmoid, GELU, Exp, ….
    """

    function: nn.Module
    qualified_name: str

    @classmethod
    def from_float(cls, source: nn.Module, qconfig: Any = None) -> Self:
        """Take over an elementwise module.

        Raises:
            ValueError: No qconfig with an activation, or a PReLU with a slope per channel.
        """
        self = super().from_float(nn.Module(), qconfig or getattr(source, "qconfig", None))
        slopes: Any = source.num_parameters if layer_class(source, nn.PReLU) else 1
        if slopes > 1:
            raise ValueError(
                f"{module_path(source)} (PReLU): one table holds one slope, got "
                f"{slopes}; use one slope, or run it on the CPU (hybrid_dict)"
            )
        self.qualified_name = module_path(source)
        remember_qconfig(self, source, self.qconfig)
        self.training = source.training
        self.function = source
        if getattr(source, "inplace", False):  # its input may have other readers
            own: Any = take_over(type(source), source)
            own.inplace = False
            self.function = own
        return self

    def to_float(self) -> nn.Module:
        """Return the float function."""
        return self.function

    def forward(self, x: Tensor) -> Tensor:
        """Compute and quantize."""
        return quantized_output(self, self.function(quantized_input(self, x)))
