"""Ranges that follow what the quantizers see, frame by frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_quantizers import TensorQuantizer, named_quantizers

__all__ = ["RangeFollower", "keep_within_ranges", "narrow_weights", "weighted_layers"]


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


DECAY = 0.99


class RangeFollower:
    """Keeps every range at that share of the largest value which calibration gave it.

    For an activation m ← 0.99·m + 0.01·max|x| after each frame, the moving average of Jacob et al.
    2018 (arXiv 1712.05877, section 3.1), and amax = amax₀·m/m₀, with amax₀ the calibrated range
    and m₀ the mean maximum of some frames before training: a range that mse chose below the
    maximum stays below it. For a weight, channel by channel, amax = amax₀·max|w|/max|w₀|. What saw
    nothing, or only zeros, keeps its range.

    A frame's maxima are handed out instead of being applied at once: all frames of a step see the
    same ranges, in whatever process they are run.

    Args:
        model: Calibrated, from `quantize_model`; quantizers that are disabled, or have no range,
            are left alone.

    Attributes:
        first: float32 [activations], m₀.
        mean: float32 [activations], m.
    """

    def __init__(self, model: nn.Module) -> None:
        ranged = [
            entry.quantizer
            for entry in named_quantizers(model)
            if not entry.quantizer._disabled and entry.quantizer.amax is not None
        ]
        layers = {layer.weight_quantizer: layer for layer in weighted_layers(model)}
        self._activations = [q for q in ranged if q not in layers and q.axis is None]
        self._calibrated = torch.tensor([float(_amax(q)) for q in self._activations])
        self._weights = [
            (layers[q], _amax(q).clone(), _largest(layers[q])) for q in ranged if q in layers
        ]
        self._seen = torch.zeros(len(self._activations))
        self.first, self.mean = torch.zeros_like(self._seen), torch.zeros_like(self._seen)
        self._places = {q: place for place, q in enumerate(self._activations)}
        self._handles = [q.register_forward_pre_hook(self._note) for q in self._activations]

    def take(self) -> Tensor:
        """The maxima since the last call, float32 [activations]; 0 where nothing came by."""
        seen = self._seen.clone()
        self._seen.zero_()
        return seen

    def start(self, maxima: Sequence[Tensor]) -> None:
        """Set m₀ and m from some frames' maxima, before training."""
        seen = torch.stack(list(maxima))
        self.first = seen.sum(0) / (seen > 0).sum(0).clamp(min=1)
        self.mean = self.first.clone()

    @torch.no_grad()
    def follow(self, maxima: Iterable[Tensor]) -> None:
        """Take the maxima of a step's frames, in their order, and the weights as they are now."""
        for seen in maxima:
            moved = DECAY * self.mean + (1 - DECAY) * seen
            self.mean = torch.where((seen > 0) & (self.first > 0), moved, self.mean)
        share = torch.where(self.first > 0, self.mean / self.first, 1.0)
        for quantizer, amax in zip(self._activations, self._calibrated * share, strict=True):
            _amax(quantizer).fill_(float(amax))
        for layer, calibrated, first in self._weights:
            now = _largest(layer)
            share = torch.where((first > 0) & (now > 0), now / first, 1.0)
            _amax(layer.weight_quantizer).copy_(calibrated * share)

    def stop(self) -> None:
        """Look at nothing any more."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _note(self, quantizer: nn.Module, args: tuple[Any, ...]) -> None:
        value = args[0].detach()
        if value.numel():
            place = self._places[quantizer]  # type: ignore[index]
            self._seen[place] = torch.maximum(self._seen[place], value.abs().amax().float().cpu())


def _amax(quantizer: TensorQuantizer) -> Tensor:
    amax = quantizer.amax
    assert amax is not None
    return amax


@torch.no_grad()
def _largest(layer: Any) -> Tensor:
    """max|w| over what shares a range, in the range's shape."""
    weight: Tensor = layer.weight_to_quantize().abs()
    amax = _amax(layer.weight_quantizer)
    if amax.dim() != weight.dim():
        return weight.amax().reshape(amax.shape)
    shared = [axis for axis, size in enumerate(amax.shape) if size == 1]
    return weight.amax(shared, keepdim=True) if shared else weight
