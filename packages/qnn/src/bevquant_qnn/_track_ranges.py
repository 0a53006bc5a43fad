"""Ranges that follow the activations for the first steps of training, then stand still."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bevquant_qnn._holders import activation_quantizers
from bevquant_quantizers import TensorQuantizer

__all__ = ["RangeTracker", "track_ranges"]


class RangeTracker:
    """The handle that `track_ranges` returns.

    Attributes:
        steps: After how many forward passes in training mode the ranges stand still.
        done: How many there were. Set it when a run is resumed; the ranges themselves are in the
            model's state dict.
    """

    def __init__(self, model: nn.Module, steps: int, decay: float) -> None:
        self.steps = steps
        self.done = 0
        self._decay = decay
        self._training = model
        quantizers = dict.fromkeys(holder.quantizer for holder in activation_quantizers(model))
        self._handles = [q.register_forward_pre_hook(self._follow) for q in quantizers]
        self._handles.append(model.register_forward_hook(self._count))

    @property
    def frozen(self) -> bool:
        """Whether the ranges stand still."""
        return self.done >= self.steps

    def stop(self) -> None:
        """Let the ranges stand still from now on."""
        self.done = max(self.done, self.steps)
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _follow(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        quantizer: TensorQuantizer = module  # type: ignore[assignment]
        value = args[0]
        usable = isinstance(value, Tensor) and value.numel() > 0 and not quantizer._disabled
        if not self._training.training or self.frozen or not usable or quantizer.axis is not None:
            return
        largest = value.detach().abs().amax().float()
        now = quantizer.amax
        if now is None:
            quantizer.amax = largest
        else:
            now.mul_(self._decay).add_(largest.to(now) * (1 - self._decay))

    def _count(self, module: nn.Module, args: Any, output: Any) -> None:
        if module.training:
            self.done += 1
            if self.frozen:
                self.stop()


def track_ranges(model: nn.Module, steps: int, *, decay: float = 0.99) -> RangeTracker:
    """Let activation ranges follow their largest values while the model trains, for `steps` passes.

    After each use in training mode amax ← decay·amax + (1 − decay)·max|x| (Jacob et al. 2018,
    arXiv 1712.05877, section 3.1: moving averages, frozen once the network is stable). Evaluation
    changes nothing. A quantizer without a range starts with its first batch's. Weight ranges are
    as they were: constants where calibrated, else max|w| of each step.

    Args:
        model: From `quantize_model`, called as a whole once a training step.
        steps: Forward passes in training mode until the ranges stand still.
        decay: Share of the old range that each pass keeps, 0 to 1.

    Returns:
        The tracker, which removes its hooks by itself.

    Raises:
        ValueError: A negative number of steps, or a decay outside 0 to 1.

    Example:
        >>> import torch
        >>> from bevquant_qnn import QuantLinear
        >>> layer = QuantLinear(2, 2)
        >>> tracker = track_ranges(layer, steps=1)
        >>> for size in (1.0, 5.0):
        ...     output = layer(torch.full((1, 2), size))
        >>> tracker.frozen, layer.input_quantizer.amax
        (True, tensor(1.))
    """
    if steps < 0 or not 0 <= decay <= 1:
        raise ValueError(
            f"track_ranges: steps must not be negative and decay in 0…1, got {steps} and {decay}"
        )
    tracker = RangeTracker(model, steps, decay)
    if tracker.frozen:
        tracker.stop()
    return tracker
