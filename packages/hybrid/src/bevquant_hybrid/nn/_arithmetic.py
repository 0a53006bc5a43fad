"""The arithmetic that FloatFunctional offers, whatever it is computed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["FLOAT_OPERATIONS", "Arithmetic"]


def _matmul(tensors: list[Tensor], x_trans: bool, y_trans: bool) -> Tensor:
    x, y = tensors
    return torch.matmul(x.mT if x_trans else x, y.mT if y_trans else y)


FLOAT_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "add": lambda tensors: tensors[0] + tensors[1],
    "add_relu": lambda tensors: torch.relu(tensors[0] + tensors[1]),
    "sub": lambda tensors: tensors[0] - tensors[1],
    "mul": lambda tensors: tensors[0] * tensors[1],
    "maximum": lambda tensors: torch.maximum(*tensors),
    "minimum": lambda tensors: torch.minimum(*tensors),
    "matmul": _matmul,
    "cat": torch.cat,
    "mean": lambda tensors, **settings: torch.mean(*tensors, **settings),
    "sum": lambda tensors, **settings: torch.sum(*tensors, **settings),
    "add_scalar": lambda tensors, number: tensors[0] + number,
    "mul_scalar": lambda tensors, number: tensors[0] * number,
}


class Arithmetic:
    """Methods of `FloatFunctional`; one object stands for one place in a model."""

    def operate(self, name: str, tensors: list[Tensor], **settings: Any) -> Tensor:
        """Compute one of `FLOAT_OPERATIONS`."""
        return FLOAT_OPERATIONS[name](tensors, **settings)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """X + y."""
        return self.operate("add", [x, y])

    def add_relu(self, x: Tensor, y: Tensor) -> Tensor:
        """max(x + y, 0)."""
        return self.operate("add_relu", [x, y])

    def sub(self, x: Tensor, y: Tensor) -> Tensor:
        """X − y."""
        return self.operate("sub", [x, y])

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """x·y, element by element."""
        return self.operate("mul", [x, y])

    def maximum(self, x: Tensor, y: Tensor) -> Tensor:
        """The larger of either."""
        return self.operate("maximum", [x, y])

    def minimum(self, x: Tensor, y: Tensor) -> Tensor:
        """The smaller of either."""
        return self.operate("minimum", [x, y])

    def matmul(self, x: Tensor, y: Tensor, x_trans: bool = False, y_trans: bool = False) -> Tensor:
        """Matrix product; `x_trans`, `y_trans` transpose the last two axes first."""
        return self.operate("matmul", [x, y], x_trans=x_trans, y_trans=y_trans)

    def cat(self, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Join along `dim`."""
        return self.operate("cat", list(tensors), dim=dim)

    def mean(self, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        """Mean over `dim`."""
        return self.operate("mean", [x], dim=dim, keepdim=keepdim)

    def sum(self, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        """Sum over `dim`."""
        return self.operate("sum", [x], dim=dim, keepdim=keepdim)

    def add_scalar(self, x: Tensor, y: float) -> Tensor:
        """X plus a number."""
        return self.operate("add_scalar", [x], number=y)

    def mul_scalar(self, x: Tensor, y: float) -> Tensor:
        """X times a number."""
        return self.operate("mul_scalar", [x], number=y)
