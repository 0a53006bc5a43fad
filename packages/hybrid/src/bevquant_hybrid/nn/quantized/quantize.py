"""From float to fixed point and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid.nn.qat.stubs import DeQuantStub
from bevquant_hybrid.nn.quantized._weighted import FixedPoint
from bevquant_hybrid.qtensor import QTensor, of_each

__all__ = ["DeQuantize", "Quantize", "is_fixed_point"]


class Quantize(FixedPoint):
    """clamp(round(x / scale)).

    ``scale`` is a buffer that may be changed in place: ``quant.scale.fill_(1.0)`` is for integer
    inputs.
    """

    def forward(self, x: Any) -> Any:
        """Quantize; quantized values and integers in containers stay unchanged."""
        if isinstance(x, Tensor | QTensor):
            return x if isinstance(x, QTensor) else self.quantized(x)
        return of_each(x, lambda t: self.forward(t) if t.is_floating_point() else t)


def is_fixed_point(module: Any) -> bool:
    """Whether a module belongs to a converted model: fixed-point, or `DeQuantize`."""
    return isinstance(module, FixedPoint | DeQuantize)


class DeQuantize(DeQuantStub):
    """Integers times scale, as float32; of all tensors in lists, tuples and dicts."""

    def __init__(self, source: nn.Module | None = None) -> None:
        torch.nn.Module.__init__(self)
        self.training = False
