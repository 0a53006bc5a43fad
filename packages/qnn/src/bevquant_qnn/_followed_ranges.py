"""Ranges that follow the values of a training which several processes share, and its weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_qnn._linear_form import as_matrix, matrix_of, put_matrix
from bevquant_qnn._sparse_convolution import QuantSparseConvolution
from bevquant_qnn._weighted import QuantWeighted
from bevquant_quantizers import TensorQuantizer, named_quantizers


def weighted_layers(model: nn.Module) -> list[Any]:
    """The modules that quantize a weight, those whose quantizer is disabled apart.

    Each has `weight_quantizer` and `weight_to_quantize`, the weight in the shape that the
    quantizer's range fits.

    Example:
        >>> from bevquant_qnn import QuantLinear
        >>> layers = nn.Sequential(QuantLinear(2, 2), nn.ReLU(), QuantLinear(2, 2))
        >>> layers[2].weight_quantizer.disable()
        >>> weighted_layers(layers) == [layers[0]]
        True
    """
    kinds = (QuantWeighted, QuantSparseConvolution)
    return [m for m in model.modules() if isinstance(m, kinds) and not m.weight_quantizer._disabled]


def narrow_weights(model: nn.Module, narrow: bool) -> None:
    """Let weights have integers from −q to q alone, or from −q − 1 on, in place.

    A range that is the largest weight never gives −q − 1, and libspconv's files do not hold it.
    Under a range that stands still weights that move could get there; so they are trained without.

    Args:
        model: From `quantize_model`.
        narrow: Whether −q − 1 is left out.
    """
    for layer in weighted_layers(model):
        layer.weight_quantizer.narrow_range = narrow


@torch.no_grad()
def keep_within_ranges(model: nn.Module) -> None:
    """Clamp weights to ±amax, in place: w ← min(max(w, −amax), amax), beyond which no integers lie.

    With `narrow_weights` on, no layer computes anything else than before; afterwards it computes
    the same without.

    Args:
        model: From `quantize_model`; weights without a range stay as they are.

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
            moved = _DECAY * self.mean + (1 - _DECAY) * seen
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
