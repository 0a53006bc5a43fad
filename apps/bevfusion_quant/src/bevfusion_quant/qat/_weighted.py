"""The layers whose weights are quantized, and weights that keep to the range of their integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["keep_within_ranges", "narrow_weights", "weighted_layers"]


def weighted_layers(model: nn.Module) -> list[Any]:
    """The modules that quantize a weight, those that are switched off apart."""
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "weight_to_quantize")]
    return [layer for layer in layers if not layer.weight_quantizer._disabled]


def narrow_weights(model: nn.Module, narrow: bool) -> None:
    """Let weights have integers from −q to q alone, or from −q − 1 as everywhere else.

    A range that is the largest weight never gives −q − 1, and libspconv's files do not hold it.
    Once weights move under a range that stands still they could; so they are trained without.
    """
    for layer in weighted_layers(model):
        layer.weight_quantizer.narrow_range = narrow


@torch.no_grad()
def keep_within_ranges(model: nn.Module) -> None:
    """Cut weights to ±amax, beyond which they have no other integers.

    With `narrow_weights` on, no layer computes anything else than before; afterwards it computes
    the same without.
    """
    for layer in weighted_layers(model):
        amax: Tensor | None = layer.weight_quantizer.amax
        if amax is not None:
            weight: Tensor = layer.weight_to_quantize()  # a view of the parameter
            weight.copy_(torch.maximum(torch.minimum(weight, amax), -amax))
