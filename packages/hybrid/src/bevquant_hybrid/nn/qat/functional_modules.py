"""QAT arithmetic on quantized tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from bevquant_hybrid.nn._functions import Arithmetic

from ._base import OutputQuantized, quantized_input, quantized_output


class FloatFunctional(Arithmetic, OutputQuantized):
    """Compute on the float values and quantize the result; one object per place."""

    def to_float(self) -> nn.Module:
        """Return the module that this one was made of."""
        made = super().to_float()
        made.activation_post_process = nn.Identity()
        return made

    def operate(self, name: str, tensors: list[Tensor], **settings: Any) -> Tensor:
        """Compute one operation and quantize its result."""
        values = [quantized_input(self, tensor) for tensor in tensors]
        return quantized_output(self, super().operate(name, values, **settings))
