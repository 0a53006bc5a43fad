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


class LinearReLU(Linear, activation="relu"):
    """Linear layer, ReLU."""


class LinearReLU6(Linear, activation="relu6"):
    """Linear layer, ReLU6."""


class LinearAdd(Linear, adds=True):
    """Linear layer, addition of a second input."""


class LinearAddReLU(LinearAdd, activation="relu"):
    """Linear layer, addition, ReLU."""


class LinearAddReLU6(LinearAdd, activation="relu6"):
    """Linear layer, addition, ReLU6."""
