"""What each quantizer sees: a histogram of the values it is handed, beside its range."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bevfusion_quant.measure._value_counts import count_values

__all__ = ["QuantizerRow", "QuantizerValues", "QuantizerWatch", "watch_quantizers"]

Hook = Callable[[nn.Module, Any], None]
# Few enough that a bin spans several steps of values already quantized: no moiré in the pictures.
BINS = 80


@dataclass
class QuantizerValues:
    """Values one quantizer was handed in one forward pass, and its range.

    `counts` and `edges` are a histogram over [−m, m], m the largest magnitude; `amax` holds one
    range, or one per output channel.
    """

    paths: tuple[str, ...]
    bits: int
    amax: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    largest: float = 0.0
    beyond: int = 0
    zeros: int = 0
    total: int = 0

    @property
    def edges(self) -> npt.NDArray[np.float64]:
        """Bin edges of `counts`."""
        return np.linspace(-self.largest or -1.0, self.largest or 1.0, BINS + 1)

    @property
    def is_weight(self) -> bool:
        """Whether this quantizes a weight."""
        return self.paths[0].endswith("_weight_quantizer")


@dataclass(frozen=True)
class QuantizerRow:
    """One quantizer in the summary: its paths, range, share of values beyond it and zero."""

    paths: tuple[str, ...]
    bits: int
    channels: int
    amax_min: float
    amax_max: float
    largest: float
    saturated: float
    zeros: float

    @classmethod
    def of(cls, values: QuantizerValues) -> QuantizerRow:
        """Summarise what a quantizer saw."""
        total = max(values.total, 1)
        return cls(
            values.paths,
            values.bits,
            values.amax.size,
            float(values.amax.min()),
            float(values.amax.max()),
            values.largest,
            values.beyond / total,
            values.zeros / total,
        )


class QuantizerWatch:
    """Histograms of what every calibrated quantizer is handed, in two passes over one batch.

    The first pass, under `measuring`, finds each quantizer's largest magnitude; the second, under
    `counting`, fills the bins. A quantizer that several layers share appears once, under all its
    paths.
    """

    def __init__(self, model: nn.Module) -> None:
        seen: dict[nn.Module, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            if isinstance(getattr(module, "_amax", None), Tensor):
                seen.setdefault(module, []).append(path)
        self._found = {
            module: QuantizerValues(tuple(paths), cast(int, module.num_bits), _amax(module))
            for module, paths in seen.items()
        }

    def measuring(self) -> AbstractContextManager[None]:
        """Around the first pass."""
        return self._hooked(_measure)

    def counting(self) -> AbstractContextManager[None]:
        """Around the second."""
        return self._hooked(_count)

    def values(self) -> list[QuantizerValues]:
        """What was seen."""
        return list(self._found.values())

    @contextmanager
    def _hooked(self, watch: Callable[[QuantizerValues], Hook]) -> Iterator[None]:
        with ExitStack() as stack, torch.no_grad():
            for module, values in self._found.items():
                stack.callback(module.register_forward_pre_hook(watch(values)).remove)
            yield


def watch_quantizers(model: nn.Module, run: Callable[[nn.Module], object]) -> list[QuantizerValues]:
    """Run the model twice and histogram the input of every calibrated quantizer."""
    watch = QuantizerWatch(model)
    for passing in (watch.measuring, watch.counting):
        with passing():
            run(model)
    return watch.values()


def _amax(module: nn.Module) -> npt.NDArray[np.float64]:
    amax = module._amax
    assert isinstance(amax, Tensor)
    return amax.detach().double().flatten().numpy()


def _measure(values: QuantizerValues) -> Hook:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].numel():
            low, high = args[0].detach().aminmax()
            values.largest = max(values.largest, -float(low), float(high))

    return hook


def _count(values: QuantizerValues) -> Hook:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach()
        if not x.numel():
            return
        beyond, zeros = count_values(
            _by_channel(x, cast(Tensor, module._amax)),
            values.amax,
            values.largest or 1.0,
            values.counts,
        )
        values.total += x.numel()
        values.beyond += beyond
        values.zeros += zeros

    return hook


def _by_channel(x: Tensor, amax: Tensor) -> npt.NDArray[np.float32]:
    """The values as [before, channels, after], the channels those that have a range each."""
    axis = next((i for i, n in enumerate(amax.shape) if n > 1), None)
    if axis is None:
        return x.float().reshape(1, 1, -1).numpy()
    axis += x.ndim - amax.ndim
    channels = x.shape[axis]
    before = math.prod(x.shape[:axis])
    return x.float().reshape(before, channels, -1).numpy()
