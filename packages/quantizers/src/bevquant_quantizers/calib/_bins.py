"""The edges of a histogram's bins, and the sum of two histograms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bevquant_quantizers._abs_histogram import AbsHistogram, add_counts, merge_bins

__all__ = ["bin_edges", "combine"]


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

    Raises:
        ValueError: The base bins differ.
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
