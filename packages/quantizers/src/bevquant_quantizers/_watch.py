"""Values at each quantizer: a histogram, beside its range."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bevquant_graph import check_kind

from ._format import NumBits, format_of
from ._jit import has_numba
from ._memory_order import as_it_lies, memory_order

# Few enough that a bin spans several steps of values already quantized: no moiré in the pictures.
BINS = 80


@dataclass
class QuantizerValues:
    """Values of one quantizer in one forward pass, and its range.

    `counts` and `edges` are a histogram over ±`span`, the largest magnitude of the first call,
    doubled until it holds the values of later calls. `amax` holds one range, or one per output
    channel. `form` is the name of the format, as in `Format.name`.
    """

    paths: tuple[str, ...]
    bits: int
    amax: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    largest: float = 0.0
    span: float = 0.0
    beyond: int = 0
    zeros: int = 0
    total: int = 0
    form: str = ""

    @property
    def edges(self) -> npt.NDArray[np.float64]:
        """Bin edges of `counts`."""
        return np.linspace(-self.reach, self.reach, BINS + 1)

    @property
    def reach(self) -> float:
        """The last of `edges`."""
        return self.span or self.largest or 1.0

    def widen(self, largest: float) -> None:
        """Widen the histogram to values of that magnitude; pairs of bins become one."""
        self.largest = max(self.largest, largest)
        if not self.span or math.isinf(largest):
            self.span = self.largest
        while self.span < self.largest:
            pairs = self.counts.reshape(-1, 2).sum(1)
            self.counts[:] = np.pad(pairs, BINS // 4)
            self.span *= 2

    @property
    def is_weight(self) -> bool:
        """Whether this quantizes a weight."""
        return self.paths[0].endswith("_weight_quantizer")


@dataclass(frozen=True)
class QuantizerRow:
    """One quantizer in the summary: paths, range, share of values beyond the range and of zeros."""

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
        """Summarise the values of a quantizer."""
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


@contextmanager
def watching_quantizers(model: nn.Module) -> Iterator[list[QuantizerValues]]:
    """Record a histogram of the input of each calibrated quantizer, for the length of the block.

    A quantizer of several layers appears once, with all its paths.
    """
    check_kind(model, nn.Module, "a torch module")
    seen: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(getattr(module, "_amax", None), Tensor):
            seen.setdefault(module, []).append(path)
    with ExitStack() as stack, torch.no_grad():
        found = []
        for module, paths in seen.items():
            form = format_of(cast(NumBits, module.num_bits))
            values = QuantizerValues(tuple(paths), form.bits, _amax(module), form=form.name)
            stack.callback(module.register_forward_pre_hook(_count(values)).remove)
            found.append(values)
        yield found


def watch_quantizers(model: nn.Module, run: Callable[[nn.Module], object]) -> list[QuantizerValues]:
    """Run the model and record a histogram of the input of each calibrated quantizer.

    Args:
        model: Model with calibrated quantizers.
        run: Runs it, once or several times.

    Example:
        >>> from bevquant_quantizers import TensorQuantizer
        >>> model = nn.Sequential(TensorQuantizer())
        >>> model[0].amax = 1.0
        >>> (seen,) = watch_quantizers(model, lambda model: model(torch.tensor([0.0, 4.0])))
        >>> seen.paths, seen.largest, seen.beyond, seen.zeros
        (('0',), 4.0, 1, 1)
    """
    with watching_quantizers(model) as found:
        run(model)
    return found


def _amax(module: nn.Module) -> npt.NDArray[np.float64]:
    amax = module._amax
    assert isinstance(amax, Tensor)
    return amax.detach().double().flatten().numpy()


def _count(values: QuantizerValues) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach()
        if not x.numel():
            return
        low, high = as_it_lies(x).aminmax()
        values.widen(max(-float(low), float(high)))
        beyond, zeros = count_values(
            _by_channel(x, cast(Tensor, module._amax)), values.amax, values.reach, values.counts
        )
        values.total += x.numel()
        values.beyond += beyond
        values.zeros += zeros

    return hook


def _by_channel(x: Tensor, amax: Tensor) -> npt.NDArray[np.float32]:
    """The values as [before, channels, after], the channels those that have a range each."""
    axis = next((i for i, n in enumerate(amax.shape) if n > 1), None)
    if axis is None:
        return as_it_lies(x).float().reshape(1, 1, -1).numpy()
    order = memory_order(x)
    axis = order.index(axis + x.ndim - amax.ndim)
    x = x.permute(order)
    before, channels = math.prod(x.shape[:axis]), x.shape[axis]
    return x.float().reshape(before, channels, -1).numpy()


def count_values(
    values: npt.NDArray[np.float32],
    amax: npt.NDArray[np.float64],
    span: float,
    counts: npt.NDArray[np.int64],
) -> tuple[int, int]:
    """Add the values to a histogram; count those beyond their range and those that are 0.

    Values are [before, channels, after], with a range for each channel; the histogram covers
    [−span, span], and its last bin includes span.
    """
    if has_numba():
        from ._counts_numba import count_signed

        return count_signed(values, amax, span, counts)
    bins = len(counts)
    with np.errstate(invalid="ignore"):
        places = (values.ravel().astype(np.float64) + span) * (bins / (2.0 * span))
        inside = places[(places >= 0) & (places <= bins)].astype(np.int64)
    counts += np.bincount(np.minimum(inside, bins - 1), minlength=bins)
    beyond = np.count_nonzero(np.abs(values) > amax[None, :, None])
    return int(beyond), int(np.count_nonzero(values == 0))
