"""Whether a sum of products fits the 32-bit accumulator; it is never allowed to wrap."""

from __future__ import annotations

import torch
from torch import Tensor

_LIMIT = 2**31
_PIECE = 1 << 20  # values
_REMEDY = "use fewer bits for its input or its weight, or split the layer's input channels"


class AccumulatorOverflowError(ValueError):
    """A sum that a 32-bit accumulator cannot hold."""


def sums_of_sizes(weight: Tensor, channel_axis: int) -> Tensor:
    """Σ|w| of each output channel, int64; `channel_axis` numbers the channels.

    A few channels at a time: int64 takes eight times the memory of a weight.
    """
    channels = weight.movedim(channel_axis, 0)
    few = max(1, len(channels) * _PIECE // max(weight.numel(), 1))
    rest = tuple(range(1, weight.dim()))
    return torch.cat([part.to(torch.int64).abs().sum(rest) for part in channels.split(few)])


def largest_sum(sums: Tensor, bias: Tensor | None, largest_input: int) -> int:
    """Bound every accumulator of a layer, partial sums too: max_c (Σ|w_c|·max|x| + |b_c|).

    Args:
        sums: Σ|w_c| of `sums_of_sizes`.
        bias: Integers ``[out_channels]`` or ``None``.
        largest_input: max|x|, from the data or from its type.
    """
    total = sums * largest_input
    if bias is not None:
        total = total + bias.to(total.device, torch.int64).abs()
    return int(total.max()) if total.numel() else 0


def proves_safe(bound: int) -> bool:
    """Whether a bound of `largest_sum` shows that no accumulator can leave int32."""
    return bound < _LIMIT


def fits_by_type(x: Tensor, sums: Tensor, bias: Tensor | None) -> bool:
    """Whether no input of the type of `x` can make a sum that leaves int32."""
    return proves_safe(largest_sum(sums, bias, -torch.iinfo(x.dtype).min))


def fits_by_values(x: Tensor, sums: Tensor, bias: Tensor | None) -> bool:
    """Whether these inputs cannot."""
    largest = int(x.long().abs().max()) if x.numel() else 0
    return proves_safe(largest_sum(sums, bias, largest))


def check_accumulators(
    acc: Tensor, name: str, channel_axis: int = -1, remedy: str = _REMEDY
) -> None:
    """Refuse exact sums (int64, or whole float64) that leave int32.

    Args:
        acc: The sums.
        name: The layer that a message names.
        channel_axis: Axis of the output channels.
        remedy: What the message tells to do.

    Raises:
        AccumulatorOverflowError: The message names the layer, the channel and the bits needed.
    """
    outside = (acc >= _LIMIT) | (acc < -_LIMIT)
    if not bool(outside.any()):
        return
    place = outside.nonzero()[0]
    channel = int(place[channel_axis % acc.dim()])
    value = int(acc[tuple(place)])
    needed = 1 + (value if value >= 0 else -value - 1).bit_length()
    raise AccumulatorOverflowError(
        f"{name}: the accumulator of output channel {channel} reaches {value}, which takes "
        f"{needed} bits and leaves int32; {remedy}"
    )
