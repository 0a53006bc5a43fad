"""Average pooling of integers."""

from __future__ import annotations

import torch.nn.functional as F

from bevquant_hybrid import _integer_ops as ops
from bevquant_hybrid.nn.qat import avg_pool2d
from bevquant_hybrid.nn.quantized._base import FixedPoint, integers
from bevquant_hybrid.qtensor import QTensor

__all__ = ["AdaptiveAvgPool2d", "AvgPool2d"]


class AvgPool2d(FixedPoint):
    """round(Σx·s_x / (n·s_y)) over windows."""

    def __init__(self, source: avg_pool2d.AvgPool2d, rounding: str) -> None:
        super().__init__(source, rounding)
        if source.divisor_override is not None:
            raise ValueError(
                f"{self.qualified_name} (AvgPool2d): divisor_override={source.divisor_override}: a "
                "BPU divides by the size of the window; multiply with mul_scalar behind it"
            )
        stride = source.stride if source.stride is not None else source.kernel_size
        self.kernel_size = ops.pair(source.kernel_size)
        self.stride = ops.pair(stride)
        self.padding = ops.pair(source.padding)
        self.ceil_mode = source.ceil_mode
        self.count_include_pad = source.count_include_pad

    def forward(self, x: QTensor) -> QTensor:
        """Pool integers."""
        x = integers(self, x)
        return self.output(
            ops.avg_pool(
                x.int_repr(),
                self.kernel_size,
                self.stride,
                self.padding,
                x.scale.double() / self.scale.double(),
                self.ceil_mode,
                self.count_include_pad,
                self.rounding,
                self.qualified_name,
            )
        )


class AdaptiveAvgPool2d(FixedPoint):
    """Mean over windows that follow from the output's size, quantized."""

    def __init__(self, source: avg_pool2d.AdaptiveAvgPool2d, rounding: str) -> None:
        super().__init__(source, rounding)
        self.output_size = source.output_size

    def forward(self, x: QTensor) -> QTensor:
        """Pool integers."""
        means = F.adaptive_avg_pool2d(integers(self, x).int_repr().double(), self.output_size)
        return self.quantized(means * x.scale.double())
