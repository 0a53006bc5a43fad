"""Integer operations on accumulators: a bias, a second input, sums over axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import bevquant_int8sim as int8sim
from bevquant_hybrid._torch_operator import operator

__all__ = ["accumulate", "quantize_bias", "sum_over"]


@operator("(Tensor bias, Tensor input_scale, Tensor weight_scale, str name) -> Tensor")
def quantize_bias(bias: Tensor, input_scale: Tensor, weight_scale: Tensor, name: str) -> Tensor:
    """round(b / (s_x·s_w)) as int32, half to even."""
    step = weight_scale if weight_scale.numel() > 1 else weight_scale.reshape(())
    return int8sim.quantize_bias(bias, input_scale.reshape(()), step, name=name)


@operator(
    "(Tensor acc, Tensor other, Tensor multiplier, int axis, str rounding, str name) -> Tensor"
)
def accumulate(
    acc: Tensor, other: Tensor, multiplier: Tensor, axis: int, rounding: str, name: str
) -> Tensor:
    """Acc + round(other · multiplier), the second input brought to the accumulator's scale.

    Raises:
        AccumulatorOverflowError: A sum leaves int32.
    """
    factor = multiplier.double()
    if factor.numel() > 1:
        shape = [1] * acc.dim()
        shape[axis] = -1
        factor = factor.reshape(shape)
    aligned = other.double() * factor
    aligned = torch.floor(aligned + 0.5) if rounding == "half_up" else aligned.round()
    total = acc.long() + aligned.long()
    if total.numel() and int(total.abs().max()) >= 2**31:
        raise int8sim.AccumulatorOverflowError(
            f"{name}: its accumulator and the second input together leave int32"
        )
    return total.to(torch.int32)


@operator("(Tensor x, int[] dim, bool keepdim) -> Tensor")
def sum_over(x: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    """Exact sum over axes, int64."""
    return x.to(torch.int64).sum(list(dim), keepdim=keepdim)
