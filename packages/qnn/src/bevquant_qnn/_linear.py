"""Quantized fully connected layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_qnn._weighted import QuantWeighted


class QuantLinear(QuantWeighted, nn.Linear):
    """`torch.nn.Linear` on a fake-quantized input [..., in] and weight [out, in].

    y = fq(x)·fq(w)ᵀ + b, one range for x and one per row (output) of w.

    Args:
        *args: As `torch.nn.Linear`.
        quant_desc_input: Descriptor of the input quantizer.
        quant_desc_weight: Descriptor of the weight quantizer.
        **kwargs: As `torch.nn.Linear`.

    Example:
        >>> import torch
        >>> QuantLinear(4, 2)(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    float_class = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """Multiply the fake-quantized input by the fake-quantized weight; the bias is float."""
        return F.linear(self.quantized_input(input), self.quantized_weight(), self.bias)
