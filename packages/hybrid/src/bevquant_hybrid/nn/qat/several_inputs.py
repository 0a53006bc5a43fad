"""Operators of several tensors that train quantized: division, gated units, RoIAlign."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid.nn._arithmetic import Div as FloatDiv
from bevquant_hybrid.nn._arithmetic import Where as FloatWhere
from bevquant_hybrid.nn._roi_align import MultiScaleRoIAlign as FloatMultiScaleRoIAlign
from bevquant_hybrid.nn.qat._base import OutputQuantized, quantized_input, quantized_output

__all__ = ["GLU", "Div", "MultiScaleRoIAlign", "Where"]


class Div(OutputQuantized, FloatDiv):
    """x / y with a scale of its own."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        """Divide, and quantize the result."""
        numerator = quantized_input(self, x)
        divisor = quantized_input(self, y, "second input")
        # As in fixed point: x/0 is the largest integer (the fake quantizer clamps), 0/0 is 0. The
        # observer gets finite values, and the divisor that is 0 no gradient.
        zero = divisor == 0
        ratio = torch.div(numerator, divisor.masked_fill(zero, 1.0))
        return quantized_output(self, torch.where(zero, numerator.sign() * _top(self), ratio))


def _top(module: OutputQuantized) -> Tensor | float:
    """The largest value of a module's scale so far; 0 before any."""
    fake_quant = module.activation_post_process
    if not getattr(fake_quant, "observed", False) or not hasattr(fake_quant, "current_scale"):
        return 0.0
    top: Tensor = fake_quant.current_scale() * fake_quant.quant_max
    return top


class Where(OutputQuantized, FloatWhere):
    """X or y with a scale of its own."""

    def forward(  # type: ignore[override]
        self, condition: Tensor, x: Tensor | float, y: Tensor | float
    ) -> Tensor:
        """Select, and quantize the result."""
        values = [quantized_input(self, v) if isinstance(v, Tensor) else v for v in (x, y)]
        chosen: Any = torch.where(condition, *values)
        return quantized_output(self, chosen)


class GLU(OutputQuantized, nn.GLU):
    """Gated linear unit with a scale of its own."""


class MultiScaleRoIAlign(OutputQuantized, FloatMultiScaleRoIAlign):
    """RoIAlign on quantized maps, with a scale of its own: each map has another one."""

    def forward(  # type: ignore[override]
        self, featmaps: Sequence[Tensor], boxes: Sequence[Tensor]
    ) -> Tensor:
        """Align, and quantize the result."""
        values = [quantized_input(self, x, f"feature map {i}") for i, x in enumerate(featmaps)]
        return quantized_output(self, FloatMultiScaleRoIAlign.forward(self, values, boxes))
