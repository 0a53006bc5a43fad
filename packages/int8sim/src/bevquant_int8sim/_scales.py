"""Checks of operands: integer tensors, scales and multipliers, accumulators."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# Whether a sum of products fits the 32-bit accumulator; it is never allowed to wrap.
_LIMIT = 2**31
_PIECE = 1 << 20  # values
_REMEDY = "use fewer bits for its input or its weight, or split the layer's input channels"


class AccumulatorOverflowError(ValueError):
    """A sum that a 32-bit accumulator cannot hold."""


def sums_of_sizes(weight: Tensor, channel_axis: int) -> Tensor:
    """Σ|w| of each output channel, int64; `channel_axis` numbers the channels."""
    channels = weight.movedim(channel_axis, 0)
    # A few channels at a time: int64 takes eight times the memory of a weight.
    few = max(1, len(channels) * _PIECE // max(weight.numel(), 1))
    rest = tuple(range(1, weight.dim()))
    return torch.cat([part.to(torch.int64).abs().sum(rest) for part in channels.split(few)])


def largest_sum(sums: Tensor, bias: Tensor | None, largest_input: int) -> int:
    """Bound every accumulator of a layer, partial sums too: max_c (Σ|w_c|·max|x| + |b_c|).

    `sums` are Σ|w_c| of `sums_of_sizes`; `largest_input` is max|x|, from the data or from its type.
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
    """Refuse exact sums (int64, or whole float64) that leave int32."""
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


# Ranges of signed integers, and the tensor types that hold them.
_HOLDING = {8: torch.int8, 16: torch.int16, 32: torch.int32}


def integer_range(bits: int, narrow_range: bool = False, what: str = "bits") -> tuple[int, int]:
    """Smallest and largest signed integer of `bits` bits; narrow ones leave out the smallest."""
    if not isinstance(bits, int) or not 2 <= bits <= 32:
        raise ValueError(
            f"{what}={bits}: expected an integer from 2 to 32 (8, 16 and 32 are what chips compute "
            "in)"
        )
    top = 2 ** (bits - 1) - 1
    return (-top if narrow_range else -top - 1), top


def holding_dtype(bits: int) -> torch.dtype:
    """The smallest of int8, int16 and int32 that holds `bits` bits."""
    return next(dtype for width, dtype in _HOLDING.items() if bits <= width)


def check_integer_tensor(
    name: str, what: str, value: Any, allowed: tuple[torch.dtype, ...]
) -> torch.Tensor:
    """Return `value` as a tensor of one of the integer types `allowed`."""
    is_tensor = isinstance(value, torch.Tensor)
    if not isinstance(value, torch.Tensor) or value.dtype not in allowed:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        came = str(value.dtype).removeprefix("torch.") if is_tensor else type(value).__name__
        remedy = ""
        if is_tensor and value.is_floating_point():
            remedy = "; quantize() makes integers of float values"
        raise TypeError(f"{name}: {what} must be a tensor of {kinds}, got {came}{remedy}")
    return value


_SMALLEST = 2.0**-126  # the smallest normal float32: chips flush what lies below


def checked_scale(scale: Tensor | float, what: str) -> Tensor:
    """`scale` as float64 with none or one axis."""
    if not isinstance(scale, Tensor):
        try:  # a Python float would become float32
            scale = torch.as_tensor(scale, dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{what}: expected a number, got {type(scale).__name__}") from error
        except (OverflowError, RuntimeError) as error:
            raise ValueError(f"{what} exceeds the range of float64") from error
    values = scale.detach()
    if values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{what}: expected real numbers, got {values.dtype}")
    values = values.to(torch.float64)
    if values.dim() > 1 or values.numel() == 0:
        raise ValueError(
            f"{what}: expected one number or one per channel, got shape {tuple(values.shape)}"
        )
    low, high = (float(end) for end in values.aminmax())  # both are NaN where an entry is
    if not _SMALLEST <= low <= high < math.inf:
        bad = ~((values >= _SMALLEST) & torch.isfinite(values))
        entry = int(bad.reshape(-1).nonzero()[0])
        number = float(values.reshape(-1)[entry])
        where = f" of channel {entry}" if values.dim() else ""
        reason = "not finite" if not math.isfinite(number) else "zero, subnormal or negative"
        raise ValueError(
            f"{what}{where} is {number}, which is {reason}; calibrate the range it comes from"
        )
    return values


def single_scale(scale: Tensor | float, what: str) -> float:
    """One positive number."""
    values = checked_scale(scale, what)
    if values.numel() != 1:
        raise ValueError(f"{what}: expected one number, got {values.numel()}, one per channel")
    return float(values)


def along_axis(values: Tensor, like: Tensor, axis: int, what: str) -> Tensor:
    """`values` shaped to broadcast along `axis` of `like`; a single number fits every shape."""
    values = values.to(like.device)
    if values.dim() == 0:
        return values
    if not -like.dim() <= axis < like.dim():
        raise ValueError(f"{what}: axis {axis} does not exist in shape {tuple(like.shape)}")
    if like.shape[axis] != values.shape[0]:
        raise ValueError(
            f"{what}: {values.shape[0]} values for {like.shape[axis]} channels along axis {axis} "
            f"of shape {tuple(like.shape)}; give one per channel, or a single number"
        )
    shape = [1] * like.dim()
    shape[axis] = values.shape[0]
    return values.view(shape)
