"""Arithmetic on several tensors as modules, so that each result can have a scale."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn import quantized as torch_quantized
from torch.jit._trace import TracerWarning


def _matmul(tensors: list[Tensor], x_trans: bool, y_trans: bool) -> Tensor:
    x, y = tensors
    left, right = (v.transpose(-1, -2) if t else v for v, t in ((x, x_trans), (y, y_trans)))
    return torch.matmul(left, right)


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


def _number(value: Any) -> float:
    """A number as a program keeps it: torch.jit.trace has tensors where shapes give numbers."""
    if not isinstance(value, Tensor):
        return float(value) if isinstance(value, int | float) else value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)
        return float(value)


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
        """Join along `dim`.

        Raises:
            TypeError: One tensor in the place of the list, as torch raises.
        """
        if isinstance(tensors, Tensor):
            name = getattr(self, "qualified_name", "") or type(self).__name__
            raise TypeError(
                f"{name}: cat: expected a list or tuple of tensors, got one tensor of "
                f"{tensors.dim()} axes; hand over all that are joined"
            )
        return self.operate("cat", list(tensors), dim=dim)

    def mean(self, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        """Mean over `dim`."""
        return self.operate("mean", [x], dim=dim, keepdim=keepdim)

    def sum(self, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        """Sum over `dim`."""
        return self.operate("sum", [x], dim=dim, keepdim=keepdim)

    def add_scalar(self, x: Tensor, y: float) -> Tensor:
        """X plus a number."""
        return self.operate("add_scalar", [x], number=_number(y))

    def mul_scalar(self, x: Tensor, y: float) -> Tensor:
        """X times a number."""
        return self.operate("mul_scalar", [x], number=_number(y))


class FloatFunctional(Arithmetic, torch_quantized.FloatFunctional):
    """`torch.nn.quantized.FloatFunctional` with sub, mean, sum, maximum, minimum and matmul.

    One object stands for one place in a model: its QAT form keeps the scale of that result.

    Example:
        >>> import torch
        >>> FloatFunctional().sub(torch.tensor(3.0), torch.tensor(1.0))
        tensor(2.)
    """

    __module__ = "bevquant_hybrid.nn.quantized.functional_modules"  # its documented home


class Div(nn.Module):
    """x / y, element by element; shapes broadcast.

    Quantized, x/0 is the largest integer of x's sign and 0/0 is 0. BAYES divides 16 bits.

    Example:
        >>> Div()(torch.tensor([3.0]), torch.tensor([2.0]))
        tensor([1.5000])
    """

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Divide."""
        return torch.div(x, y)


class Where(nn.Module):
    """X where a condition holds, else y; x or y may be a number, and shapes broadcast.

    Quantized, both are brought to the result's scale, each rounded once.

    Example:
        >>> x = torch.tensor([-1.0, 2.0])
        >>> Where()(x > 0, x, 0.5)
        tensor([0.5000, 2.0000])
    """

    def forward(self, condition: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor:
        """Select."""
        return torch.where(condition, x, y)
