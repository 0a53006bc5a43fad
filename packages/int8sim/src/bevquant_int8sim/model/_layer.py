"""A quantized layer in integers: weight, bias and scales, however its float module stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bevquant_int8sim._quantize import quantize, quantize_bias
from bevquant_int8sim.model._form import Integers
from bevquant_int8sim.model._quantizers import SMALLEST_AMAX, is_active
from bevquant_quantizers import TensorQuantizer, fake_quantize


@dataclass(frozen=True, eq=False)
class Layer:
    """A convolution or linear layer.

    Attributes:
        op: ``"sparse_conv"``, ``"conv"``, ``"conv_transpose"`` or ``"linear"``.
        weight: int8, in the layout that the kernel of `op` reads.
        bias: int32 ``[out_channels]`` in units of the accumulator, or ``None``.
        scale: float64 ``[out_channels]``: value of one unit of each accumulator, s_x · s_w.
        input: Integers that it reads.
        relu: Whether a ReLU belongs to it.
        settings: Strides and the like; constants that JSON can hold.
    """

    op: str
    weight: Tensor
    bias: Tensor | None
    scale: Tensor
    input: Integers
    relu: bool
    settings: Mapping[str, Any]


def weight_problem(quantizer: TensorQuantizer) -> str:
    """Why a weight's quantizer has no integers for the kernels; empty where it has."""
    if not is_active(quantizer):
        return "its weight quantizer is off"
    if quantizer.num_bits > 8 or quantizer._unsigned:
        return "its weight has no signed integers of 8 bits or fewer"
    return ""


def weight_scale(weight: Tensor, amax: Tensor | None, bits: int, path: str) -> Tensor:
    """Scale per output channel, float64: amax / (2^(bits−1) − 1); 0 for a channel of zeros.

    Args:
        weight: Float ``[out_channels, the rest]``.
        amax: Range of the weight: one number or one per channel, or ``None``: max |w| of each.
        bits: Bits of the weight.
        path: The layer that a message names.

    Raises:
        ValueError: A weight that is not finite, or a zero range for weights that are not zero.
    """
    largest = weight.abs().amax(1) if weight.shape[1] else weight.new_zeros(weight.shape[0])
    if not bool(largest.isfinite().all()):
        channel = int((~largest.isfinite()).nonzero()[0])
        raise ValueError(
            f"simulate: {path}: a weight of channel {channel} is NaN or infinite; train or load "
            "the model again"
        )
    ranges = (largest if amax is None else amax).double().reshape(-1).expand(len(weight))
    dead = ranges <= SMALLEST_AMAX
    lost = dead & (largest.double() > SMALLEST_AMAX)
    if bool(lost.any()):
        channel = int(lost.nonzero()[0])
        raise ValueError(
            f"simulate: {path}: the weight's range of channel {channel} is zero or too small, its "
            f"largest weight is {float(largest[channel]):g}; calibrate the weight quantizer again"
        )
    scale: Tensor = ranges.masked_fill(dead, 0.0) / (2 ** (bits - 1) - 1)
    return scale


def integer_weight(weight: Tensor, scale: Tensor, bits: int, narrow: bool) -> Tensor:
    """The integers that fake quantization rounds to; zeros where s is 0.

    round(w / s), half to even, clamped to the integers of `bits`. Whether a weight lies on a tie is
    fake quantization's word, which multiplies by (2^(bits−1) − 1)/amax in float32: of −amax/2 at
    four bits float64 would make another integer.

    Args:
        weight: Float ``[out_channels, the rest]``.
        scale: From `weight_scale`.
        bits: Bits of the weight.
        narrow: Whether the most negative integer is left out.
    """
    dead = scale == 0
    amax = (scale * (2 ** (bits - 1) - 1)).float()[:, None]
    weight = fake_quantize(weight, amax, bits, narrow_range=narrow)
    q = quantize(weight, scale.masked_fill(dead, 1.0), bits=bits, narrow_range=narrow)
    return torch.where(dead[:, None], torch.zeros_like(q), q)


def integer_bias(
    bias: Tensor | None, input_scale: float, scale: Tensor, path: str
) -> tuple[Tensor | None, Tensor]:
    """``(int32 bias, scale of the accumulator)``, both per channel.

    A channel whose weights are all zero has a bias and no scale: it gets the finest one of the
    layer that still holds its bias.
    """
    live = scale[scale > 0]
    finest = float(live.min()) if live.numel() else 2.0**-20
    filled = scale.masked_fill(scale == 0, finest)
    if bias is not None:
        needed = bias.detach().abs().double() / input_scale / 2.0**30
        filled = torch.where(scale == 0, torch.maximum(filled, needed), filled)
    total = filled * input_scale
    if bias is None:
        return None, total
    return quantize_bias(bias.detach(), input_scale, filled, name=f"simulate: {path}"), total
