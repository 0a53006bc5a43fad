"""The range from a histogram of absolute values."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bevquant_quantizers._abs_histogram import AbsHistogram, abs_histogram, add_counts, merge_bins
from bevquant_quantizers._descriptor import Axis
from bevquant_quantizers._format import NumBits

from ._calibrator import Calibrator
from ._search import search_amax

_log = logging.getLogger(__name__)
_GROWTH = 32
_MOST_BINS = 1 << 20


class HistogramCalibrator(Calibrator):
    """Counts absolute values in equal bins; one collection serves every search method.

    The first tensor's largest value sets the width, ``num_bins`` bins reaching exactly to it.
    Larger values append bins of that width, as upstream; where more than ``32 · num_bins`` would
    be needed, neighbouring bins are merged in pairs, so that memory stays bounded. Counts are
    int64 and exact. Tensors of zeros before the first other value are counted; empty tensors
    change nothing.

    Args:
        num_bits: Bits of the integer, or of FP8.
        axis: Axes with a histogram and a range of their own; None is one for the whole tensor.
        unsigned: Whether the integers start at 0.
        num_bins: Bins of the first tensor.
        grow_method: Unused, as upstream, which keeps it for old scripts.
        skip_zeros: Leave zeros out, as for the features of padded or masked cells.
        torch_hist: Unused: both of upstream's collections are this one.

    Raises:
        TypeError: `num_bits` is no integer or pair.
        ValueError: `num_bins` below 1 or above 2²⁰.

    Examples:
        >>> import torch
        >>> calibrator = HistogramCalibrator(8, None, False)
        >>> calibrator.collect(torch.arange(100))
        >>> round(calibrator.compute_amax("percentile", percentile=90).item())
        89
    """

    def __init__(
        self,
        num_bits: NumBits,
        axis: Axis,
        unsigned: bool,
        num_bins: int = 2048,
        grow_method: str | None = None,
        skip_zeros: bool = False,
        torch_hist: bool = True,
    ) -> None:
        super().__init__(num_bits, axis, unsigned)
        if type(num_bins) is not int or not 1 <= num_bins <= _MOST_BINS:
            raise ValueError(f"num_bins must be an integer from 1 to {_MOST_BINS}, got {num_bins}")
        if grow_method is not None:
            _log.warning("grow_method is deprecated. Got %s, ignored!", grow_method)
        self._num_bins = num_bins
        self._skip_zeros = skip_zeros
        self._torch_hist = torch_hist
        self.reset()

    def reset(self) -> None:
        """Forget everything collected."""
        self._rows: list[AbsHistogram] = []
        self._shape: tuple[int, ...] = ()
        self._device = torch.device("cpu")
        # Edges of a histogram taken over from elsewhere; its own rule gives others in the last bit.
        self._own_edges: Tensor | None = None

    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Count a tensor's absolute values.

        Raises:
            ValueError: NaN or infinite values, or a number of channels that differs from before.
        """
        kept = self._kept_axes(x)
        if x.numel() == 0:
            return
        shape = tuple(n if i in kept else 1 for i, n in enumerate(x.shape)) if kept else ()
        if self._rows and shape != self._shape:
            raise ValueError(
                f"{self._who()}: histograms of shape {self._shape} cannot take a tensor of shape "
                f"{tuple(x.shape)}, which needs {shape}"
            )
        new = [
            self._count(row, x, self._rows[i] if self._rows else None)
            for i, row in enumerate(self._split(x, kept))
        ]
        # Nothing is kept of a tensor that any row refuses.
        if self._rows:
            new = [combine(old, add) for old, add in zip(self._rows, new, strict=True)]
        self._rows = new
        self._shape, self._device = shape, x.device

    def compute_amax(
        self,
        method: str = "mse",
        *,
        stride: int = 1,
        start_bin: int = 128,
        percentile: float = 99.99,
    ) -> Tensor | None:
        r"""Search the range; the histogram stays as it is, so methods may follow in any order.

        Args:
            method: ``"mse"``: least mean squared difference between bin centres and their
                quantized values. ``"entropy"``: least Kullback-Leibler divergence between the
                histogram and its quantized form. ``"percentile"``: `percentile` of the values lie
                below. ``"max"``: the largest value.
            stride: Step between the candidates of mse and entropy, in bins.
            start_bin: First candidate of mse and entropy.
            percentile: Share of values to keep, 0…100.

        Returns:
            The range, float32: one value, or one for each channel, shaped to broadcast against the
            tensors collected. None where nothing was collected.

        Raises:
            TypeError: An unknown method.
            ValueError: ``"entropy"`` of FP8, a percentile outside 0…100, a stride below 1, a
                negative first bin.
        """
        found = [
            search_amax(
                method,
                row.counts.numpy(),
                self._edges(row).numpy(),
                num_bits=self._num_bits,
                unsigned=self._unsigned,
                stride=stride,
                start_bin=start_bin,
                percentile=percentile,
                largest=row.max,
            )
            for row in (self._rows or [_NOTHING])
        ]
        if not self._rows:
            return None
        return torch.tensor(found, dtype=torch.float32, device=self._device).reshape(self._shape)

    def load_histogram(self, counts: Tensor, edges: Tensor) -> None:
        """Go on from a histogram counted elsewhere, per tensor.

        Bins that start at 0 are taken as they are, edges to the bit. Others, as upstream's numpy
        collection makes them, are counted into bins of the same width that start at 0.

        Args:
            counts: Whole numbers [bins], none negative.
            edges: Ascending in equal steps, [bins + 1].

        Raises:
            ValueError: Shapes, steps or signs are not as they should be, or this calibrator keeps
                a histogram for each channel.
        """
        if self._axis is not None:
            raise ValueError(f"{self._who()}: one histogram cannot serve channels of {self._axis}")
        counts, edges = counts.detach().cpu().to(torch.int64), edges.detach().cpu().double()
        steps = edges.diff()
        if (
            counts.dim() != 1
            or edges.shape != (counts.numel() + 1,)
            or not counts.numel()
            or bool((counts < 0).any())
            or not bool(edges.isfinite().all() and (edges >= 0).all())
            or bool(((steps - steps.mean()).abs() > 0.01 * steps.mean()).any())
        ):
            raise ValueError(
                f"{self._who()}: expected counts [bins] and edges [bins + 1] in equal steps, none "
                f"negative, got shapes {tuple(counts.shape)} and {tuple(edges.shape)}"
            )
        self.reset()
        if float(edges[-1]) > 0 and float(edges[0]) == 0:
            self._own_edges = edges.float()
        elif float(edges[0]) > 0:
            width = float(steps.mean())
            bins = math.ceil(float(edges[-1]) / width)
            index = ((edges[1:] + edges[:-1]) / 2 / width).long().clamp(max=bins - 1)
            counts = torch.zeros(bins, dtype=torch.int64).index_add_(0, index, counts)
            edges = torch.tensor([0.0, bins * width])
        upper = float(edges[-1].float())
        values = int(counts.sum())
        self._rows = [AbsHistogram(counts, counts.numel(), upper, 0, upper, values, 0, 0, 0)]

    @property
    def _calib_hist(self) -> Tensor | list[Tensor] | None:
        """Counts under upstream's name: a tensor, or a list of them per channel."""
        return self._view([row.counts for row in self._rows])

    @property
    def _calib_bin_edges(self) -> Tensor | list[Tensor] | None:
        """Bin edges under upstream's name, one more than counts."""
        return self._view([self._edges(row) for row in self._rows])

    def _view(self, rows: list[Tensor]) -> Tensor | list[Tensor] | None:
        if not rows:
            return None
        return rows[0] if self._axis is None else rows

    def _split(self, x: Tensor, kept: list[int]) -> list[Tensor]:
        if self._axis is None:
            return [x]
        front = x.movedim(kept, list(range(len(kept))))
        return list(front.reshape(-1, *front.shape[len(kept) :]).unbind())

    def _count(self, row: Tensor, x: Tensor, old: AbsHistogram | None) -> AbsHistogram:
        new = abs_histogram(
            row,
            old.bins if old else self._num_bins,
            old.upper if old else None,
            shift=old.shift if old else 0,
            max_bins=_GROWTH * max(self._num_bins, old.bins if old else 0),
        )
        if new.nans or new.infs:
            raise ValueError(
                f"{self._who()}: a tensor of shape {tuple(x.shape)} with {new.nans} NaN and "
                f"{new.infs} infinite values cannot be calibrated: find where they arise, or "
                "leave this batch out"
            )
        if self._skip_zeros:
            new.counts[0] -= new.zeros
        return new

    def _edges(self, row: AbsHistogram) -> Tensor:
        if self._own_edges is not None and self._own_edges.numel() == row.counts.numel() + 1:
            return self._own_edges
        return bin_edges(row)

    def __str__(self) -> str:
        edges = self._calib_bin_edges
        if isinstance(edges, Tensor):
            text = f"[{edges[0]:.3f}, ..., {edges[-1]:.3f}]({edges.numel()})"
        else:
            text = "None" if edges is None else f"{len(edges)} channels"
        return f"HistogramCalibrator(calib_bin_edges={text})"

    def __repr__(self) -> str:
        return (
            f"HistogramCalibrator({super().__repr__()} calib_bin_edges={self._calib_bin_edges} "
            f"calib_hist={self._calib_hist})"
        )


_NOTHING = AbsHistogram(torch.zeros(1, dtype=torch.int64), 1, 0.0, 0, 0.0, 0, 0, 0, 0)


def bin_edges(histogram: AbsHistogram) -> Tensor:
    """Edges of a histogram's bins, float32 [num_bins + 1], with upstream's rounding.

    As many bins as at first: ``torch.linspace(0, upper)``. Grown: multiples of its first step.
    """
    first = torch.linspace(0, histogram.upper, histogram.bins + 1)
    if histogram.shift == 0 and histogram.counts.numel() == histogram.bins:
        return first
    width = float(first[1]) * 2.0**histogram.shift
    return (torch.arange(histogram.counts.numel() + 1, dtype=torch.float64) * width).float()


def combine(old: AbsHistogram, new: AbsHistogram) -> AbsHistogram:
    """Add two histograms of one quantity whose base bins agree: exact, in any order.

    A histogram that has seen only zeros takes the bins of the other.
    """
    if not old.upper and new.upper:
        old = replace(old, counts=_only_zeros(old), bins=new.bins, upper=new.upper, shift=new.shift)
    elif old.upper and not new.upper:
        new = replace(new, counts=_only_zeros(new), bins=old.bins, upper=old.upper, shift=old.shift)
    if (old.bins, old.upper) != (new.bins, new.upper):
        raise ValueError(
            f"histograms of {old.bins} bins up to {old.upper:g} and of {new.bins} bins up to "
            f"{new.upper:g} cannot be added: their bins have different widths"
        )
    shift = max(old.shift, new.shift)
    fields: dict[str, Any] = {
        key: getattr(old, key) + getattr(new, key) for key in ("values", "zeros", "nans", "infs")
    }
    return AbsHistogram(
        counts=add_counts(
            merge_bins(old.counts, shift - old.shift), merge_bins(new.counts, shift - new.shift)
        ),
        bins=old.bins,
        upper=old.upper,
        shift=shift,
        max=max(old.max, new.max),
        peak=_first_peak(old, new),
        **fields,
    )


def _first_peak(old: AbsHistogram, new: AbsHistogram) -> int:
    """The first batch that held the larger maximum; unknown where that one's is."""
    if old.max != new.max:
        return old.peak if old.max > new.max else new.peak
    known = [row.peak for row in (old, new) if row.peak >= 0]
    return min(known, default=-1)


def _only_zeros(histogram: AbsHistogram) -> Tensor:
    return histogram.counts[:1].clone()
