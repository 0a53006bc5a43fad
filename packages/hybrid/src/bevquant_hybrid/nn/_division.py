"""Division of two tensors as a module, so that its result can have a scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Div"]


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
