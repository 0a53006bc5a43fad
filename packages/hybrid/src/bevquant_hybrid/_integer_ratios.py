"""Quotients of integers: division, gated units, softmax, each rounded once at its end."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bevquant_hybrid._torch_operator import operator

__all__ = ["divide", "gate", "shares", "split_mask"]


@operator("(Tensor x, Tensor y, Tensor scale_x, Tensor scale_y) -> Tensor")
def divide(x: Tensor, y: Tensor, scale_x: Tensor, scale_y: Tensor) -> Tensor:
    """x·s_x / (y·s_y) in float64; x/0 is infinite with x's sign, 0/0 is 0."""
    ratio = (x.double() * scale_x.double()) / (y.double() * scale_y.double())
    return ratio.nan_to_num(0.0, torch.inf, -torch.inf)


@operator("(Tensor x, Tensor scale, int dim) -> Tensor")
def gate(x: Tensor, scale: Tensor, dim: int) -> Tensor:
    """a·σ(b) of the halves a and b of x·s along an axis, in float64."""
    return F.glu(x.double() * scale.double(), dim)


@operator("(Tensor x, Tensor scale, Tensor? excluded, int dim) -> Tensor")
def shares(x: Tensor, scale: Tensor, excluded: Tensor | None, dim: int) -> Tensor:
    """Shares e / Σe in float64, with e = round(32767·exp((x − max x)·s)) in 16 bits.

    What is excluded takes no part in maximum and sum, and has no share.
    """
    q = x.long()
    if excluded is not None:
        q = q.masked_fill(excluded, torch.iinfo(torch.int16).min)
    below = q - q.amax(dim, keepdim=True)
    exponentials = torch.floor(32767 * torch.exp(below.double() * scale.double()) + 0.5)
    if excluded is not None:
        exponentials = exponentials.masked_fill(excluded, 0.0)
    return exponentials / exponentials.sum(dim, keepdim=True).clamp(min=1.0)


@operator("(Tensor mask) -> (Tensor, Tensor)")
def split_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where a float mask is −∞, and the mask with 0 there."""
    excluded = mask.isneginf()
    return excluded, mask.masked_fill(excluded, 0.0)
