"""clamp(round(x / s))·s with a gradient that passes straight through, two nodes in an ONNX file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bevquant_hybrid.qtensor import along, calling_module


def is_written() -> bool:
    """Whether a model runs to be written into a file: nothing is observed then."""
    return torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()


def fake_quantize(
    x: Tensor, scale: Tensor, ch_axis: int, quant_min: int, quant_max: int, saturate: bool = False
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
        return _quantize_dequantize(x, scale, ch_axis, quant_min, quant_max)
    scale = scale.detach()
    if saturate:
        # Values that are clamped get no gradient: half a step beyond the ends still rounds to them.
        steps = x.detach() / along(scale, x.dim(), ch_axis)
        inside = (steps >= quant_min - 0.5) & (steps <= quant_max + 0.5)
        x = torch.where(inside, x, x.detach())
    result: Tensor = _StraightThrough.apply(x, scale, ch_axis, quant_min, quant_max)
    return result


def _rounded(x: Tensor, scale: Tensor, ch_axis: int, quant_min: int, quant_max: int) -> Tensor:
    """The forward pass alone."""
    if ch_axis < 0:
        step = scale.reshape(()).float()
        zero = torch.zeros((), dtype=torch.int32, device=scale.device)
        return torch.fake_quantize_per_tensor_affine(x, step, zero, quant_min, quant_max)
    zeros = torch.zeros_like(scale, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(
        x, scale.float(), zeros, ch_axis, quant_min, quant_max
    )


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, ch_axis: int, quant_min: int, quant_max: int
    ) -> Tensor:
        return _rounded(x, scale, ch_axis, quant_min, quant_max)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None, None


def _quantize_dequantize(
    x: Tensor, scale: Tensor, ch_axis: int, quant_min: int, quant_max: int
) -> Tensor:
    """Quantize and dequantize, and be two nodes with two constants in the file."""
    if (quant_min, quant_max) != (-128, 127):
        raise ValueError(
            f"{calling_module()}: ONNX export: a tensor quantized to {quant_min} … {quant_max}: "
            "QuantizeLinear of opset 11 and 13 makes 8-bit integers only; give that layer a qint8 "
            "qconfig, or run it on the CPU (hybrid_dict)"
        )
    # A single scale is the whole tensor's, whatever axis it came with.
    axis = -1 if scale.shape[0] == 1 else ch_axis
    if torch.compiler.is_exporting():
        return _traced(x, scale.detach(), axis)
    result: Tensor = _Nodes.apply(x, scale.detach().reshape(-1).tolist(), axis)
    return result


def _traced(x: Tensor, scale: Tensor, axis: int) -> Tensor:
    """The two nodes for the exporter based on torch.export."""
    step = scale.reshape(()) if axis < 0 else scale
    zero = torch.zeros(step.shape, dtype=torch.int8)
    attributes: Any = {} if axis < 0 else {"axis": axis}
    node = torch.onnx.ops.symbolic
    shape = list(x.shape)
    integers = node(
        "QuantizeLinear", (x, step, zero), attributes, dtype=torch.int8, shape=shape, version=18
    )
    result: Tensor = node(
        "DequantizeLinear",
        (integers, step, zero),
        attributes,
        dtype=torch.float32,
        shape=shape,
        version=18,
    )
    return result


class _Nodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: list[float], ch_axis: int) -> Tensor:
        return _rounded(x, torch.tensor(scale), ch_axis, -128, 127)

    @staticmethod
    def symbolic(g: Any, x: Any, scale: list[float], ch_axis: int) -> Any:
        per_channel = ch_axis >= 0 and g.opset >= 13
        zeros = torch.zeros(len(scale) if per_channel else (), dtype=torch.int8)
        # Before opset 13 there is no axis attribute, and the file is for hb_mapper, which takes a
        # scale per output channel with a single zero point.
        axis = {"axis_i": ch_axis} if per_channel else {}
        step = g.op("Constant", value_t=torch.tensor(scale))
        zero = g.op("Constant", value_t=zeros)
        integers = g.op("QuantizeLinear", x, step, zero, **axis)
        return g.op("DequantizeLinear", integers, step, zero, **axis).setType(x.type())
