"""Layer norm and softmax that train quantized."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bevquant_hybrid.nn._layer_norm import LayerNorm as AnyAxesLayerNorm
from bevquant_hybrid.nn.qat._base import OutputQuantized, quantized_input, quantized_output

__all__ = ["LayerNorm", "Softmax"]


class LayerNorm(OutputQuantized, AnyAxesLayerNorm):
    """Layer norm with a scale of its own."""


class Softmax(OutputQuantized, nn.Softmax):
    """Softmax with a scale of its own."""

    def forward(self, x: Tensor, excluded: Tensor | None = None) -> Tensor:
        """Normalize, and quantize the result.

        Args:
            x: Quantized.
            excluded: Where True, a value counts as −∞; a row without others gives zeros.
        """
        values = quantized_input(self, x)
        if excluded is None:
            return quantized_output(self, nn.Softmax.forward(self, values))
        shares = nn.Softmax.forward(self, values.masked_fill(excluded, -torch.inf))
        return quantized_output(self, shares.masked_fill(excluded, 0.0))
