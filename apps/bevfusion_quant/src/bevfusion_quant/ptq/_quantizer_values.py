"""What each quantizer sees: a histogram of the values it is handed, beside its range."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

__all__ = ["QuantizerRow", "QuantizerValues", "watch_quantizers"]

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


def watch_quantizers(model: nn.Module, run: Callable[[nn.Module], object]) -> list[QuantizerValues]:
    """Run the model once and histogram the input of every calibrated quantizer.

    A quantizer that several layers share appears once, under all its paths. The pass is run twice:
    the first finds each quantizer's largest magnitude, the second fills the bins.
    """
    seen: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(getattr(module, "_amax", None), Tensor):
            seen.setdefault(module, []).append(path)
    found = {
        module: QuantizerValues(tuple(paths), cast(int, module.num_bits), _amax(module))
        for module, paths in seen.items()
    }
    for watch in (_measure, _count):
        with ExitStack() as stack, torch.no_grad():
            for module, values in found.items():
                hook = module.register_forward_pre_hook(watch(values))
                stack.callback(hook.remove)
            run(model)
    return list(found.values())


def _amax(module: nn.Module) -> npt.NDArray[np.float64]:
    amax = module._amax
    assert isinstance(amax, Tensor)
    return amax.detach().double().flatten().numpy()


Hook = Callable[[nn.Module, Any], None]


def _measure(values: QuantizerValues) -> Hook:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].numel():
            values.largest = max(values.largest, float(args[0].detach().abs().max()))

    return hook


def _count(values: QuantizerValues) -> Hook:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach()
        values.total += x.numel()
        values.zeros += x.numel() - int(torch.count_nonzero(x))
        values.beyond += int(torch.count_nonzero(x.abs() > cast(Tensor, module._amax)))
        if values.largest > 0:
            span = values.largest
            values.counts += (
                torch.histc(x.float().flatten(), BINS, -span, span).numpy().astype(np.int64)
            )

    return hook
