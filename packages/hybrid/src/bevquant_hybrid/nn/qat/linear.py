"""Fully connected layers that train quantized."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_hybrid.nn.qat._weighted import Weighted

__all__ = [
    "Linear",
    "LinearAdd",
    "LinearAddReLU",
    "LinearAddReLU6",
    "LinearReLU",
    "LinearReLU6",
]


class Linear(Weighted, nn.Linear):  # type: ignore[misc]
    """Fully connected layer with a quantized weight and output."""

    output_channel_axis = -1

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply."""
        return F.linear(x, weight, bias)


class LinearReLU(Linear):
    """Linear layer, ReLU."""

    activation = "relu"


class LinearReLU6(Linear):
    """Linear layer, ReLU6."""

    activation = "relu6"


class LinearAdd(Linear):
    """Linear layer, addition of a second input."""

    adds = True


class LinearAddReLU(LinearAdd):
    """Linear layer, addition, ReLU."""

    activation = "relu"


class LinearAddReLU6(LinearAdd):
    """Linear layer, addition, ReLU6."""

    activation = "relu6"
