"""Quotients of integers, rounded once at their end, and the masks of a softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bevquant_hybrid._torch_operator import operator

__all__ = ["divide", "exclude", "filled", "gate", "split_mask"]


@operator("(Tensor x, Tensor y, Tensor scale_x, Tensor scale_y) -> Tensor")
def divide(x: Tensor, y: Tensor, scale_x: Tensor, scale_y: Tensor) -> Tensor:
    """x·s_x / (y·s_y) in float64; x/0 is infinite with x's sign, 0/0 is 0."""
    ratio = (x.double() * scale_x.double()) / (y.double() * scale_y.double())
    return ratio.nan_to_num(0.0, torch.inf, -torch.inf)


@operator("(Tensor x, Tensor scale, int dim) -> Tensor")
def gate(x: Tensor, scale: Tensor, dim: int) -> Tensor:
    """a·σ(b) of the halves a and b of x·s along an axis, in float64."""
    return F.glu(x.double() * scale.double(), dim)


def filled(x: Tensor, excluded: Tensor, lowest: bool, dim: int | None) -> Tensor:
    """The tensor with its smallest value, or 0, where a mask is True.

    With `dim`, rows along it that are True alone stay as they are: nothing would be left of them.
    """
    where = excluded if dim is None else excluded & ~excluded.all(dim, keepdim=True)
    return x.masked_fill(where, x.detach().amin() if lowest and x.numel() else 0)


@operator("(Tensor x, Tensor excluded, bool lowest, int? dim) -> Tensor")
def exclude(x: Tensor, excluded: Tensor, lowest: bool, dim: int | None) -> Tensor:
    """`filled` of integers."""
    return filled(x, excluded, lowest, dim)


@operator("(Tensor mask) -> (Tensor, Tensor)")
def split_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where a float mask is −∞, and the mask with 0 there."""
    excluded = mask.isneginf()
    return excluded, mask.masked_fill(excluded, 0.0)
