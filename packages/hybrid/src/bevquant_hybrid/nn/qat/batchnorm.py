"""QAT batch norms that are not fused."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from bevquant_hybrid._fake_quant._fake_quantize import FakeQuantize

from ._base import OutputQuantized, derived, quantized_input, quantized_output


def channel_affine(bn: Any) -> tuple[Tensor, Tensor]:
    """Factor and offset per channel of a batch norm in evaluation."""
    factor = torch.rsqrt(bn.running_var + bn.eps)
    if bn.weight is not None:
        factor = factor * bn.weight
    offset = -bn.running_mean * factor
    if bn.bias is not None:
        offset = offset + bn.bias
    return factor, offset


class _Alone(OutputQuantized):
    """An unfused batch norm: in evaluation a depthwise 1×1 convolution, as on the BPU."""

    weight_fake_quant: Any

    @classmethod
    def from_float(cls, source: nn.Module, qconfig: Any = None) -> Self:
        """Take over a batch norm."""
        self = super().from_float(source, qconfig)
        make: Any = getattr(self.qconfig, "weight", None)
        self.weight_fake_quant = make() if make else None
        self._factor_and_offset()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Normalize, and quantize the result."""
        values = quantized_input(self, x)
        factor, offset = self._factor_and_offset()
        if self.training:
            # In training the batch's own statistics count.
            normalize: Any = super(OutputQuantized, self).forward
            return quantized_output(self, normalize(values))
        shape = (1, -1) + (1,) * (values.dim() - 2)
        return quantized_output(self, values * factor.view(shape) + offset.view(shape))

    def _factor_and_offset(self) -> tuple[Tensor, Tensor]:
        """Factor (quantized; its range follows the statistics) and offset in evaluation."""
        factor, offset = channel_affine(self)
        if isinstance(self.weight_fake_quant, FakeQuantize):
            factor = self.weight_fake_quant(factor.reshape(-1, 1, 1, 1)).dequantize().reshape(-1)
        return factor, offset


BatchNorm2d, BatchNorm3d, SyncBatchNorm = (
    derived(_Alone, kind, __name__) for kind in (nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
)
