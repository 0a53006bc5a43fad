"""Ranges that follow the values of a training which several processes share, and its weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import check_kind
from bevquant_qnn._conv import QuantWeighted
from bevquant_qnn._linear_form import as_matrix, matrix_of, put_matrix
from bevquant_qnn._sparse_convolution import QuantSparseConvolution
from bevquant_quantizers import TensorQuantizer, named_quantizers


def weighted_layers(model: nn.Module) -> list[Any]:
    """Modules that quantize a weight, except those with a disabled quantizer.

    Each has `weight_quantizer` and `weight_to_quantize`, the weight in the shape of the quantizer's
    range.

    Example:
        >>> from bevquant_qnn import QuantLinear
        >>> layers = nn.Sequential(QuantLinear(2, 2), nn.ReLU(), QuantLinear(2, 2))
        >>> layers[2].weight_quantizer.disable()
        >>> weighted_layers(layers) == [layers[0]]
        True
    """
    check_kind(model, nn.Module, "a torch module")
    kinds = (QuantWeighted, QuantSparseConvolution)
    return [m for m in model.modules() if isinstance(m, kinds) and not m.weight_quantizer._disabled]


def narrow_weights(model: nn.Module, narrow: bool) -> None:
    """Set the integers of weights to −q…q, or to −q − 1…q, in place.

    A range equal to the largest weight never gives −q − 1, and files for libspconv cannot hold it.
    Under a constant range, weights in training could reach it; so train with narrow weights.

    Args:
        model: From `quantize_model`.
        narrow: Whether −q − 1 is left out.
    """
    for layer in weighted_layers(model):
        layer.weight_quantizer.narrow_range = narrow


@torch.no_grad()
def keep_within_ranges(model: nn.Module) -> None:
    """Clamp weights to ±amax, in place: w ← min(max(w, −amax), amax).

    There are no integers beyond ±amax. With `narrow_weights` on, no result changes; without it,
    results are then those of narrow weights.

    Args:
        model: From `quantize_model`; weights without a range are not changed.

    Example:
        >>> from bevquant_qnn import QuantLinear
        >>> layer = QuantLinear(1, 1)
        >>> layer.weight_quantizer.amax = torch.tensor([[0.5]])
        >>> layer.weight.data.fill_(-3.0)
        tensor([[-3.]])
        >>> keep_within_ranges(layer)
        >>> layer.weight.tolist()
        [[-0.5]]
    """
    for layer in weighted_layers(model):
        amax: Tensor | None = layer.weight_quantizer.amax
        if amax is not None:
            matrix = matrix_of(layer)
            limit = as_matrix(layer, amax.to(matrix).expand_as(layer.weight_to_quantize()))
            put_matrix(layer, torch.maximum(torch.minimum(matrix, limit), -limit))


_DECAY = 0.99


class RangeFollower:
    """Keeps every range at the share of the largest value that calibration gave it.

    For an activation m ← 0.99·m + 0.01·max|x| after each frame (moving average of Jacob et al.
    2018, arXiv 1712.05877, section 3.1), and amax = amax₀·m/m₀, with amax₀ the calibrated range and
    m₀ the mean maximum of some frames before training. A range that mse chose below the maximum
    stays below it. For a weight, channel by channel, amax = amax₀·max|w|/max|w₀|. A quantizer that
    saw no values, or only zeros, keeps its range.

    The maxima of a frame are returned and not applied at once: all frames of a step have the same
    ranges, in every process.

    Args:
        model: Calibrated, from `quantize_model`. Quantizers that are disabled or have no range are
            not changed.

    Attributes:
        first: float32 [activations], m₀.
        mean: float32 [activations], m.

    Example:
        >>> from bevquant_qnn import QuantLinear
        >>> layer = QuantLinear(2, 2)
        >>> layer.input_quantizer.amax = 3.0
        >>> follower = RangeFollower(layer)
        >>> follower.start([torch.tensor([4.0])])
        >>> follower.follow([torch.tensor([8.0])])
        >>> round(float(layer.input_quantizer.amax), 4)  # 3/4 of 0.99 · 4 + 0.01 · 8
        3.03
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
        """Return the maxima since the last call, float32 [activations]; 0 for unused quantizers."""
        seen = self._seen.clone()
        self._seen.zero_()
        return seen

    def start(self, maxima: Sequence[Tensor]) -> None:
        """Set m₀ and m from some frames' maxima, before training."""
        seen = torch.stack(list(maxima))
        # The mean over the frames that used the quantizer.
        self.first = seen.sum(0) / (seen > 0).sum(0).clamp(min=1)
        self.mean = self.first.clone()

    @torch.no_grad()
    def follow(self, maxima: Iterable[Tensor]) -> None:
        """Apply the maxima of a step's frames, in order, and the current weights."""
        for seen in maxima:
            moved = _DECAY * self.mean + (1 - _DECAY) * seen
            # A quantizer that this frame does not use keeps its mean.
            self.mean = torch.where((seen > 0) & (self.first > 0), moved, self.mean)
        share = torch.where(self.first > 0, self.mean / self.first, 1.0)
        for quantizer, amax in zip(self._activations, self._calibrated * share, strict=True):
            _amax(quantizer).fill_(float(amax))
        for layer, calibrated, first in self._weights:
            now = _largest(layer)
            share = torch.where((first > 0) & (now > 0), now / first, 1.0)
            _amax(layer.weight_quantizer).copy_(calibrated * share)

    def stop(self) -> None:
        """Remove all hooks."""
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
    """max|w| over the values that share a range, in the range's shape."""
    weight: Tensor = layer.weight_to_quantize().abs()
    amax = _amax(layer.weight_quantizer)
    if amax.dim() != weight.dim():
        return weight.amax().reshape(amax.shape)
    shared = [axis for axis, size in enumerate(amax.shape) if size == 1]
    return weight.amax(shared, keepdim=True) if shared else weight
