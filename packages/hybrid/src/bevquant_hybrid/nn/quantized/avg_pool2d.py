"""Average pooling of integers."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from bevquant_hybrid import _integer_ops as ops
from bevquant_hybrid.nn.quantized._weighted import FixedPoint, integers
from bevquant_hybrid.qtensor import QTensor


class AvgPool2d(FixedPoint):
    """round(Σx·s_x / (n·s_y)) over windows."""

    settings = ("ceil_mode", "count_include_pad")
    ceil_mode: bool
    count_include_pad: bool

    def __init__(self, source: Any, rounding: str) -> None:
        super().__init__(source, rounding)
        if source.divisor_override is not None:
            raise ValueError(
                f"{self.qualified_name} (AvgPool2d): divisor_override={source.divisor_override}: a "
                "BPU divides by the size of the window; multiply with mul_scalar behind it"
            )
        stride = source.stride if source.stride is not None else source.kernel_size
        sides = source.kernel_size, stride, source.padding
        self.kernel_size, self.stride, self.padding = map(ops.pair, sides)

    def forward(self, x: QTensor) -> QTensor:
        """Pool integers."""
        x = integers(self, x)
        window = self.kernel_size, self.stride, self.padding
        rule: Any = self.ceil_mode, self.count_include_pad, self.rounding, self.qualified_name
        factor = x.scale.double() / self.scale.double()
        return self.output(ops.avg_pool(x.int_repr(), *window, factor, *rule))


class AdaptiveAvgPool2d(FixedPoint):
    """Mean over windows that follow from the output's size, quantized."""

    settings = ("output_size",)
    output_size: Any

    def forward(self, x: QTensor) -> QTensor:
        """Pool integers."""
        # Sums of integers are exact in float64.
        means = F.adaptive_avg_pool2d(integers(self, x).int_repr().double(), self.output_size)
        return self.quantized(means * x.scale.double())
