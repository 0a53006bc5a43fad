"""Layer norm that trains quantized."""

from __future__ import annotations

from bevquant_hybrid.nn._layer_norm import LayerNorm as AnyAxesLayerNorm
from bevquant_hybrid.nn.qat._base import OutputQuantized

__all__ = ["LayerNorm"]


class LayerNorm(OutputQuantized, AnyAxesLayerNorm):
    """Layer norm with a scale of its own."""
