"""Inverses of small matrices by products and sums, which ONNX has; it has no inverse.

Camera geometry inverts intrinsics and poses, 3 × 3 and 4 × 4 matrices, in the forward.

    A⁻¹ = adj(A) / det(A), adj(A)ᵢⱼ = (−1)ⁱ⁺ʲ det(A without row j and column i)

with determinants expanded along their first row (Laplace). It is as exact as an LU decomposition
where A is well-conditioned, and is held against torch's as everything in a file is. Of a singular
matrix torch ends with an error, and a file divides by zero.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LARGEST = 4  # rows; a determinant of five has 120 products
_aten = torch.ops.aten
_INVERSES = (
    torch.inverse, torch.Tensor.inverse, torch.linalg.inv, _aten.inverse, _aten.inverse.default,
    _aten.linalg_inv, _aten.linalg_inv.default,
)  # fmt: skip
_SOLVES = torch.linalg.solve, _aten.linalg_solve, _aten.linalg_solve.default


class SmallInverses(TorchFunctionMode):
    """While it is active, up to four rows are inverted, and solved for matrices, by products."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _INVERSES and _is_small(args) and not kwargs:
            return _inverse(args[0])
        if func in _SOLVES and _is_small(args) and set(kwargs) <= {"left"}:
            a, b = args[:2]
            if isinstance(b, Tensor) and b.dim() == a.dim():
                inverted = _inverse(a)
                return inverted @ b if kwargs.get("left", True) else b @ inverted
        return func(*args, **kwargs)


def _is_small(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], Tensor) and 1 <= args[0].shape[-1] <= _LARGEST


def _inverse(a: Tensor) -> Tensor:
    every = tuple(range(a.shape[-1]))

    @cache
    def determinant(rows: tuple[int, ...], columns: tuple[int, ...]) -> Tensor:
        first, rest = rows[0], rows[1:]
        total = None
        for place, column in enumerate(columns):
            entry = a[..., first, column]
            if not rest:
                return entry
            product = entry * determinant(rest, _without(columns, column))
            if total is None:
                total = product
            else:
                total = total - product if place % 2 else total + product
        assert total is not None
        return total

    def adjugate(i: int, j: int) -> Tensor:
        if len(every) == 1:
            return torch.ones_like(a[..., 0, 0])
        minor = determinant(_without(every, j), _without(every, i))
        return -minor if (i + j) % 2 else minor

    lines = [torch.stack([adjugate(i, j) for j in every], -1) for i in every]
    return torch.stack(lines, -2) / determinant(every, every)[..., None, None]


def _without(numbers: tuple[int, ...], one: int) -> tuple[int, ...]:
    return tuple(number for number in numbers if number != one)
