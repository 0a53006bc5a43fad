"""Scales and multipliers: checked, in float64, laid along one axis."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SMALLEST = 2.0**-126  # the smallest normal float32: chips flush what lies below


def checked_scale(scale: Tensor | float, what: str) -> Tensor:
    """`scale` as float64 with none or one axis.

    Raises:
        TypeError: It is no number and no tensor of real ones.
        ValueError: It is empty, has two axes or more, or an entry is NaN, infinite, zero, smaller
            than the smallest normal float32, or negative.
    """
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
    """One positive number.

    Raises:
        TypeError: As `checked_scale`.
        ValueError: As `checked_scale`, or there are several.
    """
    values = checked_scale(scale, what)
    if values.numel() != 1:
        raise ValueError(f"{what}: expected one number, got {values.numel()}, one per channel")
    return float(values)


def along_axis(values: Tensor, like: Tensor, axis: int, what: str) -> Tensor:
    """`values` shaped to broadcast along `axis` of `like`; a single number fits every shape.

    Raises:
        ValueError: `axis` does not exist, or its length is not that of `values`.
    """
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
