"""Layers with a quantized weight, as steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid._qdq._call import SUM, Call
from bevquant_hybrid.nn.qat.batchnorm import channel_affine
from bevquant_hybrid.qtensor import QTensor
from bevquant_int8sim.program import Integers, Ref, Step

__all__ = ["batch_norm", "limits", "weighted"]

_OPS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.ConvTranspose2d, "conv_transpose"),
    (nn.Linear, "linear"),
    (nn.Module, "conv"),
)


def weighted(call: Call, layer: Any) -> list[Step]:
    """A layer, and the addition that is fused into it."""
    weight, scale, bias = layer.fixed_weight()
    integers = _integers(call, weight)
    op = next(name for kind, name in _OPS if isinstance(layer, kind))
    if op != "linear":
        expect_batch(call, integers.dim())
    channels = integers.shape[layer.channel_axis]
    if layer.channel_axis:
        channels *= layer.groups
    tensors = {"weight": integers, "weight_scale": scale.detach().reshape(-1).expand(channels)}
    if bias is not None:
        tensors["bias"] = bias
    x, *other = call.args
    behind = limits(call, layer.activation) if layer.activation else {}
    what = type(layer).__name__
    if not other:
        attributes = {**_settings(layer, op), **behind}
        return [call.step(op, what, (x,), attributes=attributes, tensors=tensors)]
    made = f"{call.name}{SUM}"
    first = call.step(op, what, (x,), output=made, attributes=_settings(layer, op), tensors=tensors)
    return [first, call.step("add", "add", (Ref(made), *other), attributes=behind)]


def batch_norm(call: Call, norm: Any) -> list[Step]:
    """A batch norm alone: a convolution of each channel with one number."""
    factor, offset = channel_affine(norm)
    shape = (-1, *[1] * (len(call.result.shape) - 1))
    quantized = norm.weight_fake_quant(factor.detach().reshape(-1, 1, 1, 1))
    integers = _integers(call, quantized).reshape(shape)
    count, rank = integers.shape[0], integers.dim() - 2
    attributes = {
        "stride": [1] * rank, "padding": [(0, 0)] * rank, "dilation": [1] * rank, "groups": count,
    }  # fmt: skip
    scale = quantized.scale.detach().reshape(-1).expand(count)
    tensors = {"weight": integers, "weight_scale": scale, "bias": offset.detach()}
    return [
        call.step(
            "conv", type(norm).__name__, call.args[:1], attributes=attributes, tensors=tensors
        )
    ]


def limits(call: Call, activation: str) -> dict[str, Any]:
    """What an exporter is told of a ReLU or ReLU6 behind a layer."""
    if activation == "relu":
        return {"relu": True}
    if isinstance(call.form, Integers):
        # Rounded first and clamped then: the same, as the nearest step to 6 is where 6 goes.
        top = torch.tensor(6.0) / torch.tensor(call.form.scale, dtype=torch.float32)
        return {"relu": True, "ceiling": min(call.form.high, int(top.round()))}
    return {"relu": True, "ceiling": 6.0}


def expect_batch(call: Call, rank: int) -> None:
    """Refuse pictures without a batch, which operators of ONNX do not take.

    Raises:
        ValueError: There is no first axis.
    """
    found = call.given[0]
    if isinstance(found, Tensor) and found.dim() != rank:
        raise ValueError(
            f"export_qdq_onnx: {call.path}: its input has shape {tuple(found.shape)}; expected "
            f"{rank} axes. Give the model a batch, [1, C, H, W]"
        )


def _integers(call: Call, weight: QTensor) -> Tensor:
    if weight.dtype != "qint8":
        raise ValueError(
            f"export_qdq_onnx: {call.path}: its weight is {weight.dtype}; expected qint8. Give it "
            "a qconfig with weight_dtype='qint8'"
        )
    return weight.int_repr()


def _settings(layer: Any, op: str) -> dict[str, Any]:
    if op == "linear":
        return {}
    shared = {
        "stride": list(layer.stride),
        "dilation": list(layer.dilation),
        "groups": layer.groups,
    }
    if op == "conv_transpose":
        padding = {"padding": list(layer.padding), "output_padding": list(layer.output_padding)}
        return {**shared, **padding}
    # Of the last axis first, before and behind it.
    sides = layer._reversed_padding_repeated_twice
    return {**shared, "padding": list(zip(sides[::2], sides[1::2], strict=True))[::-1]}
