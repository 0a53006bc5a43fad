"""Quantized fully connected layer."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_qnn._weighted import QuantWeighted
from bevquant_quantizers import QuantDescriptor


class QuantLinear(QuantWeighted, nn.Linear):
    """`torch.nn.Linear` on a fake-quantized input [..., in] and weight [out, in].

    y = fq(x)·fq(w)ᵀ + b, one range for x and one per row (output) of w.

    Args:
        in_features: Size of each input.
        out_features: Size of each output.
        bias: Whether to add a float bias.
        quant_desc_input: Descriptor of the input quantizer.
        quant_desc_weight: Descriptor of the weight quantizer.
        **kwargs: `device` and `dtype`, as `torch.nn.Linear`.

    Example:
        >>> import torch
        >>> QuantLinear(4, 2)(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    float_class = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        quant_desc_input: QuantDescriptor | None = None,
        quant_desc_weight: QuantDescriptor | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        self._add_quantizers(quant_desc_input, quant_desc_weight)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply the fake-quantized input by the fake-quantized weight; the bias is float."""
        return F.linear(self._quantized_input(input), self.quantized_weight(), self.bias)
