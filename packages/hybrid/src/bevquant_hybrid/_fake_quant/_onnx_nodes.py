"""Fake quantization as ONNX writes it: QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bevquant_hybrid._calling_module import calling_module

__all__ = ["quantize_dequantize"]


def quantize_dequantize(
    x: Tensor, scale: Tensor, ch_axis: int, quant_min: int, quant_max: int
) -> Tensor:
    """Quantize and dequantize, and be two nodes with two constants in the file.

    Raises:
        ValueError: Integers of 16 bits, which QuantizeLinear cannot make before opset 21.
    """
    if (quant_min, quant_max) != (-128, 127):
        raise ValueError(
            f"{calling_module()}: ONNX export: a tensor quantized to {quant_min} … {quant_max}: "
            "QuantizeLinear of opset 11 and 13 makes 8-bit integers only; give that layer a qint8 "
            "qconfig, or run it on the CPU (hybrid_dict)"
        )
    axis = -1 if scale.shape[0] == 1 else ch_axis
    if torch.compiler.is_exporting():
        return _traced(x, scale.detach(), axis)
    result: Tensor = _Nodes.apply(x, scale.detach().reshape(-1).tolist(), axis)  # type: ignore[no-untyped-call]
    return result


def _traced(x: Tensor, scale: Tensor, axis: int) -> Tensor:
    """The two nodes for the exporter that goes by torch.export."""
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
        from bevquant_hybrid._fake_quant._function import rounded

        return rounded(x, torch.tensor(scale), ch_axis, -128, 127)

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
