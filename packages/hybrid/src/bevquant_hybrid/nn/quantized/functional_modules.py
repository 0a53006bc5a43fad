"""Fixed-point arithmetic, and the float class under its documented path."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

from bevquant_hybrid import _integer_ops as ops
from bevquant_hybrid.nn._functions import Arithmetic, FloatFunctional
from bevquant_hybrid.nn.quantized._weighted import FixedPoint, integers, real
from bevquant_hybrid.qtensor import QTensor

__all__ = ["FloatFunctional", "QFunctional"]


class QFunctional(Arithmetic, FixedPoint):
    """FloatFunctional on integers: operands are rescaled to the result's scale, rounded once."""

    def operate(self, name: str, tensors: list[Tensor], **settings: Any) -> Tensor:
        """Compute one operation."""
        operands = [integers(self, tensor) for tensor in tensors]
        compute = getattr(self, f"_{name}")
        result: Tensor = compute(*operands, **settings)
        return result

    def _factor(self, x: QTensor) -> Tensor:
        return x.scale.double() / self.scale.double()

    def _sum_of_two(self, operation: Any, x: QTensor, y: QTensor) -> QTensor:
        factors = self._factor(x), self._factor(y)
        settings = self.bits, self.rounding, self.qualified_name
        return self.output(operation(x.int_repr(), y.int_repr(), *factors, *settings))

    _add = partialmethod(_sum_of_two, ops.add)
    _sub = partialmethod(_sum_of_two, ops.subtract)

    def _add_relu(self, x: QTensor, y: QTensor) -> QTensor:
        return self.output(self._add(x, y).int_repr().clamp(min=0))

    def _mul(self, x: QTensor, y: QTensor) -> QTensor:
        acc = ops.multiply(x.int_repr(), y.int_repr(), self.qualified_name)
        return self.requantized(acc, x.scale.double() * y.scale.double())

    def _matmul(self, x: QTensor, y: QTensor, x_trans: bool, y_trans: bool) -> QTensor:
        left, right = x.int_repr(), y.int_repr()
        left, right = left.mT if x_trans else left, right.mT if y_trans else right
        acc = ops.matmul(left, right, self.qualified_name)
        return self.requantized(acc, x.scale.double() * y.scale.double())

    def _cat(self, *tensors: QTensor, dim: int) -> QTensor:
        parts = [tensor.int_repr() for tensor in tensors]
        factors = [self._factor(tensor) for tensor in tensors]
        settings = dim, self.bits, self.rounding, self.qualified_name
        return self.output(ops.concat(parts, factors, *settings))

    def _sum(self, x: QTensor, dim: Any, keepdim: bool) -> QTensor:
        return self.requantized(ops.sum_over(x.int_repr(), _axes(x, dim), keepdim), x.scale)

    def _mean(self, x: QTensor, dim: Any, keepdim: bool) -> QTensor:
        axes = _axes(x, dim)
        count = 1
        for axis in axes:
            count *= x.shape[axis]
        acc = ops.sum_over(x.int_repr(), axes, keepdim)
        return self.requantized(acc, x.scale.double() / count)

    def _of_larger(self, choose: Any, x: QTensor, y: QTensor) -> QTensor:
        # At one scale, integers compare as their values do.
        left, right = (self.requantized(v.int_repr().int(), v.scale).int_repr() for v in (x, y))
        return self.output(choose(left, right))

    _maximum = partialmethod(_of_larger, torch.maximum)
    _minimum = partialmethod(_of_larger, torch.minimum)

    def _add_scalar(self, x: QTensor, number: float) -> QTensor:
        return self.quantized(real(x) + number)

    def _mul_scalar(self, x: QTensor, number: float) -> QTensor:
        return self.quantized(real(x) * number)


def _axes(x: Tensor, dim: Any) -> list[int]:
    if dim is None:
        return list(range(x.dim()))
    return [dim] if isinstance(dim, int) else list(dim)
