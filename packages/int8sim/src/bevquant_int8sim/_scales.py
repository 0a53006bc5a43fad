"""Scales and multipliers: checked, in float64, laid along one axis."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["along_axis", "checked_scale"]

_SMALLEST = 2.0**-126  # the smallest normal float32: chips flush what lies below


def checked_scale(scale: Tensor | float, what: str, *, signed: bool = False) -> Tensor:
    """`scale` as float64 with none or one axis.

    Raises:
        ValueError: It is empty, has two axes or more, or an entry is NaN, infinite, zero, smaller
            than the smallest normal float32, or negative where `signed` does not allow it.
    """
    if not isinstance(scale, Tensor):
        scale = torch.as_tensor(scale, dtype=torch.float64)  # a Python float would become float32
    values = scale.detach()
    if values.is_complex() or values.dtype == torch.bool:
        raise ValueError(f"{what}: expected real numbers, got {values.dtype}")
    values = values.to(torch.float64)
    if values.dim() > 1 or values.numel() == 0:
        raise ValueError(
            f"{what}: expected one number or one per channel, got shape {tuple(values.shape)}"
        )
    size = values.abs() if signed else values
    bad = ~((size >= _SMALLEST) & torch.isfinite(size))
    if bool(bad.any()):
        entry = int(bad.reshape(-1).nonzero()[0])
        number = float(values.reshape(-1)[entry])
        where = f" of channel {entry}" if values.dim() else ""
        reason = "not finite" if not math.isfinite(number) else "zero, subnormal or negative"
        raise ValueError(
            f"{what}{where} is {number}, which is {reason}; calibrate the range it comes from"
        )
    return values


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
