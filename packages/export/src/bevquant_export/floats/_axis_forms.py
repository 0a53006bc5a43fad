"""What is computed along an axis and has no operator: ranks, places in a list, products, distances.

- ``kthvalue`` and ``median``: of the values in order, the k-th; the lower one of two in the middle.
  The median of values of which one is no number is none either.
- ``searchsorted`` and ``bucketize``: how many of the list's values lie before a value, those equal
  to it too with ``right``. Behind all of them is where ``torch`` puts NaN.
- ``cumprod``: x[i] ← x[i] · x[i − s] for s = 1, 2, 4, …: log₂ n products, in another order than
  torch's, so that last bits may differ.
- ``cdist``: (Σ |a − b|ᵖ)^(1/p) of all pairs of rows; torch has a product of matrices for p = 2 and
  many rows, which loses digits of small distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, places = torch.sort(x, dim)
    taken = [part.narrow(dim, k - 1, 1) for part in (values, places)]
    first, second = taken if keepdim else [part.squeeze(dim) for part in taken]
    return first, second


def _median(
    x: Tensor, dim: int | None = None, keepdim: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    line, axis = (x.reshape(-1), 0) if dim is None else (x, dim)
    values, places = _kthvalue(line, (line.shape[axis] + 1) // 2, axis, keepdim)
    if x.is_floating_point():
        wrong = (line != line).any(axis, keepdim)
        values = torch.where(wrong, math.nan, values)
    return values if dim is None else (values, places)


def _searchsorted(
    line: Tensor,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor | None:
    if sorter is not None or not isinstance(x, Tensor):
        return None
    if side is not None:
        right = side == "right"
    one = line if line.dim() == 1 else line.unsqueeze(-2)
    at = x.unsqueeze(-1)
    behind = one > at
    beyond = behind if right else behind | (one == at)
    count = (~beyond).to(torch.int64).sum(-1)
    return count.to(torch.int32) if out_int32 else count


def _bucketize(x: Any, line: Tensor, **how: Any) -> Tensor | None:
    return _searchsorted(line, x, **how)


def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    size, step = x.shape[dim], 1
    while step < size:
        before = x.narrow(dim, 0, size - step)
        ones = torch.ones_like(x.narrow(dim, 0, step))
        x, step = x * torch.cat([ones, before], dim), 2 * step
    return x


def _cdist(a: Tensor, b: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    apart = (a.unsqueeze(-2) - b.unsqueeze(-3)).abs()
    if p == 0:
        return (apart != 0).to(a.dtype).sum(-1)
    if p == math.inf:
        return apart.amax(-1)
    if p == 1:
        return apart.sum(-1)
    return (apart * apart).sum(-1).sqrt() if p == 2 else (apart**p).sum(-1) ** (1 / p)


AXIS_FORMS: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {
        "kthvalue": _kthvalue, "median": _median, "searchsorted": _searchsorted,
        "bucketize": _bucketize, "cumprod": _cumprod, "cdist": _cdist,
    }
)  # fmt: skip
"""Name of a function of torch → the same of what every runtime has; None where it cannot be."""
