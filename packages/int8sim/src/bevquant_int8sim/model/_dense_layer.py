"""Quantized dense convolutions and linear layers in integers."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from bevquant_graph import layer_class, own_code, zero_padding
from bevquant_int8sim.model._form import Integers
from bevquant_int8sim.model._layer import (
    Layer,
    integer_bias,
    integer_weight,
    weight_problem,
    weight_scale,
)
from bevquant_int8sim.model._quantizers import calibrated_range

__all__ = ["dense_layer"]

_OPS: dict[type[Any], str] = {
    nn.Linear: "linear",
    nn.ConvTranspose2d: "conv_transpose",
    nn.Conv1d: "conv",
    nn.Conv2d: "conv",
    nn.Conv3d: "conv",
}


def dense_layer(module: Any, integers: Integers, path: str) -> Layer | str:
    """The layer, or why it has no integer form.

    Raises:
        ValueError: A weight's range or the bias is unusable.
    """
    cls = layer_class(module, *_OPS)
    if cls is None:
        own = own_code(module, next((c for c in _OPS if isinstance(module, c)), None))
        return own or f"{type(module).__name__} has no integer kernel"
    op = _OPS[cls]
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return f"padding_mode={module.padding_mode!r} has no integer kernel"
    quantizer = module._weight_quantizer
    problem = weight_problem(quantizer)
    if problem:
        return problem
    weight = module.weight.detach()
    amax = calibrated_range(quantizer)
    if amax is not None and amax.numel() > 1 and tuple(amax.shape) not in _range_shapes(module, op):
        return (
            f"its weight's ranges, shape {tuple(amax.shape)}, do not run along the output channels"
        )
    by_channel = _by_channel(module, weight, op)
    if amax is None and quantizer.axis is None:
        amax = weight.abs().amax()
    bits, narrow = quantizer.num_bits, quantizer._narrow_range
    scale = weight_scale(by_channel, amax, bits, path)
    q = integer_weight(by_channel, scale, bits, narrow)
    bias, accumulator = integer_bias(module.bias, integers.scale, scale, path)
    return Layer(
        op=op,
        weight=_as_stored(module, q, op).contiguous(),
        bias=bias,
        scale=accumulator,
        input=integers,
        relu=False,
        settings=_settings(module, op),
    )


def _range_shapes(module: Any, op: str) -> list[tuple[int, ...]]:
    """Shapes of ranges that number the output channels."""
    ones = (1,) * (module.weight.dim() - 2)
    if op != "conv_transpose":
        return [(module.weight.shape[0], 1, *ones)]
    groups, per_group = module.groups, module.weight.shape[1]
    grouped = (groups, 1, per_group, *ones)
    return [grouped] if groups > 1 else [(1, per_group, *ones), grouped]


def _by_channel(module: Any, weight: Tensor, op: str) -> Tensor:
    """The weight as ``[out_channels, the rest]``."""
    if op != "conv_transpose":
        return weight.reshape(weight.shape[0], -1)
    groups, per_group = module.groups, weight.shape[1]
    split = weight.reshape(groups, -1, per_group, math.prod(weight.shape[2:]))
    return split.movedim(2, 1).reshape(groups * per_group, -1)


def _as_stored(module: Any, by_channel: Tensor, op: str) -> Tensor:
    """Undo `_by_channel`."""
    shape = module.weight.shape
    if op != "conv_transpose":
        return by_channel.reshape(shape)
    groups, per_group = module.groups, shape[1]
    split = by_channel.reshape(groups, per_group, shape[0] // groups, -1)
    return split.movedim(1, 2).reshape(shape)


def _settings(module: Any, op: str) -> dict[str, Any]:
    if op == "linear":
        return {"channel_axis": -1}
    settings: dict[str, Any] = {
        "channel_axis": 1,
        "stride": tuple(module.stride),
        "dilation": tuple(module.dilation),
        "groups": module.groups,
    }
    if op == "conv_transpose":
        settings |= {
            "padding": tuple(module.padding),
            "output_padding": tuple(module.output_padding),
        }
        return settings
    return settings | {"padding": zero_padding(module)}
