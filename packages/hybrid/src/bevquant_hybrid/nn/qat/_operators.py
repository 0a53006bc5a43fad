"""QAT operators without a weight, with their own output scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid.nn import _correlation, _functions, _roi_align
from bevquant_hybrid.nn.qat._base import (
    OutputQuantized,
    derived,
    quantized_input,
    quantized_output,
)

# Of several tensors: the places of those that are quantized.
GLU, LayerNorm, RMSNorm, Where, MultiScaleRoIAlign, Correlation = (
    derived(OutputQuantized, kind, __name__, reads=reads)
    for kind, reads in (
        (nn.GLU, (0,)),
        (_functions.LayerNorm, (0,)),
        (nn.RMSNorm, (0,)),
        (_functions.Where, (1, 2)),
        (_roi_align.MultiScaleRoIAlign, (0,)),
        (_correlation.Correlation, (0, 1)),
    )
)


class Div(OutputQuantized, _functions.Div):
    """x / y with a scale of its own."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Divide, and quantize the result."""
        numerator = quantized_input(self, x)
        divisor = quantized_input(self, y, "second input")
        # As in fixed point: x/0 is the largest integer (the fake quantizer clamps), 0/0 is 0. The
        # observer gets finite values, and the divisor that is 0 no gradient.
        zero = divisor == 0
        ratio = torch.div(numerator, divisor.masked_fill(zero, 1.0))
        return quantized_output(self, torch.where(zero, numerator.sign() * largest(self), ratio))


def largest(module: Any) -> Tensor | float:
    """The largest value on a module's current scale; 0 before the first observation."""
    fake_quant = module.activation_post_process
    if not getattr(fake_quant, "observed", False) or not hasattr(fake_quant, "current_scale"):
        return 0.0
    top: Tensor = fake_quant.current_scale() * fake_quant.quant_max
    return top
