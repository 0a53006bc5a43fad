"""QAT modules whose result has the scale of their input: they quantize nothing themselves."""

from __future__ import annotations

from typing import Any, Self

from torch import nn

from bevquant_hybrid.nn.qat._base import give_back, remember_qconfig, take_over

__all__ = ["KeepsScale"]


class KeepsScale(nn.Module):
    """Base: a float module under its QAT name; quantized tensors keep their scale in its forward.

    There is no fake quantizer: every value it returns is on its input's grid already, or is
    brought there by the operation itself.
    """

    _float_class: type[nn.Module]

    @classmethod
    def from_float(cls, source: nn.Module, qconfig: Any = None) -> Self:
        """Take over a float module."""
        self = take_over(cls, source)
        self._float_class = type(source)
        remember_qconfig(self, source, qconfig or getattr(source, "qconfig", None))
        return self

    def to_float(self) -> nn.Module:
        """Return the float module that this one was made of."""
        made = give_back(self._float_class, self)
        made.__dict__.pop("_float_class")
        return made
