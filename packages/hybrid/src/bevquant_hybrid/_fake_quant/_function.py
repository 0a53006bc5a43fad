"""clamp(round(x / s))·s with a gradient that passes straight through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bevquant_hybrid.qtensor import along

__all__ = ["fake_quantize", "is_written"]


def is_written() -> bool:
    """Whether a model runs to be written into a file: nothing is observed then."""
    return torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    ch_axis: int,
    quant_min: int,
    quant_max: int,
    saturate: bool = False,
) -> Tensor:
    r"""Quantize and dequantize: :math:`\operatorname{clamp}(\operatorname{round}(x/s), q_\min, q_\max)\,s`.

    Rounds half to even, as torch's own operator, which computes it. The gradient is 1 everywhere,
    or, with `saturate`, 0 where the value was clamped. While an ONNX file is written it becomes
    QuantizeLinear and DequantizeLinear.

    Args:
        x: Float, any shape.
        scale: ``[1]``, or ``[channels]`` along `ch_axis`.
        ch_axis: Channel axis, −1 for one scale.
        quant_min: Smallest integer.
        quant_max: Largest integer.
        saturate: Whether clamped values get no gradient.

    Example:
        >>> fake_quantize(torch.tensor([0.3, 100.0]), torch.tensor([0.25]), -1, -128, 127)
        tensor([ 0.2500, 31.7500])
    """  # noqa: E501
    if torch.onnx.is_in_onnx_export():
        from bevquant_hybrid._fake_quant._onnx_nodes import quantize_dequantize

        return quantize_dequantize(x, scale, ch_axis, quant_min, quant_max)
    result: Tensor = _FakeQuantize.apply(x, scale, ch_axis, quant_min, quant_max, saturate)  # type: ignore[no-untyped-call]
    return result


def rounded(x: Tensor, scale: Tensor, ch_axis: int, quant_min: int, quant_max: int) -> Tensor:
    """The forward pass alone."""
    if ch_axis < 0:
        step = scale.reshape(()).float()
        zero = torch.zeros((), dtype=torch.int32, device=scale.device)
        return torch.fake_quantize_per_tensor_affine(x, step, zero, quant_min, quant_max)
    zeros = torch.zeros_like(scale, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(
        x, scale.float(), zeros, ch_axis, quant_min, quant_max
    )


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        ch_axis: int,
        quant_min: int,
        quant_max: int,
        saturate: bool,
    ) -> Tensor:
        if saturate:
            steps = x / along(scale, x.dim(), ch_axis)
            ctx.save_for_backward((steps >= quant_min - 0.5) & (steps <= quant_max + 0.5))
        ctx.saturate = saturate
        return rounded(x, scale.detach(), ch_axis, quant_min, quant_max)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if ctx.saturate:
            (inside,) = ctx.saved_tensors
            grad = grad * inside
        return grad, None, None, None, None, None
