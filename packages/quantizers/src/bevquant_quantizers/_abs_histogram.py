"""Exact histograms of absolute values, with bins that grow and merge without losing a count."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AbsHistogram:
    """Counts of absolute values, and what was met on the way.

    A value v lies in base bin ``floor(v · bins / upper)``, in float32 as `torch.histc` computes it
    (`upper` itself lies in the last bin); ``counts[i]`` counts the base bins
    ``i·2**shift … (i+1)·2**shift − 1``. The bin of a value thus depends on (bins, upper, shift)
    alone, whichever batch it came in: histograms of equal (bins, upper) add exactly, in any order.

    Attributes:
        counts: int64 [num_bins], on the CPU. As many as the largest value needs, at least those
            up to `upper`.
        bins: Base bins in [0, upper].
        upper: Upper edge of base bin ``bins − 1``; 0 where no nonzero value has set it yet (every
            value is then a zero and lies in bin 0).
        shift: How often neighbouring bins were merged in pairs.
        max: Largest finite absolute value, 0 where there is none.
        values: Finite values counted.
        zeros: How many of them are 0.
        nans: NaNs met (not counted).
        infs: Infinities met (not counted).
        peak: Number of the first batch that held `max`, where somebody counts batches; else −1.
    """

    counts: Tensor
    bins: int
    upper: float
    shift: int
    max: float
    values: int
    zeros: int
    nans: int
    infs: int
    peak: int = -1


# float32's largest value over its smallest, in bins, is 2^300 apart.
_LARGEST_SHIFT = 320


def impossible(histogram: AbsHistogram) -> str | None:
    """Why nothing that was counted can have given this histogram; None where something can."""
    h, size = histogram, histogram.counts.numel()
    largest = float(torch.finfo(torch.float32).max)
    if h.bins < 1 or h.shift > _LARGEST_SHIFT or size < max(-(-h.bins >> h.shift), 1):
        return f"{size} counts for {h.bins} bins, merged {h.shift} times"
    if not 0 <= h.upper <= largest or torch.tensor(h.upper).item() != h.upper:
        return f"the upper edge {h.upper!r} is no float32"
    if not 0 <= h.max <= largest:
        return f"the largest value {h.max!r} is no float32"
    if h.nans or h.infs:
        return "it counts NaN or infinite values, which are refused"
    total = float(h.counts.double().sum())
    if bool((h.counts < 0).any()) or total > 2.0**53:
        return "counts are negative or beyond 2^53"
    counted = int(h.counts.sum())
    if counted not in (h.values, h.values - h.zeros) or h.zeros > h.values:
        return f"counts sum to {counted}, of {h.values} values and {h.zeros} zeros"
    if h.upper == 0.0:
        return None if h.max == 0.0 and counted == int(h.counts[0]) else "values without bins"
    # One bin for rounding: the counts reach as far as the largest value, and no further.
    reach = math.ldexp(h.max * h.bins / h.upper, -h.shift)
    if reach > size + 1 or (reach < size - 2 and h.max > h.upper):
        return f"{size} counts for values up to {h.max:g} in bins up to {h.upper:g}"
    return None


def wide_bins(bins: int, upper: float) -> bool:
    """Say whether float32 would overflow below `upper`, so that bins are computed in float64."""
    return upper * bins > 3.0e38


def plan_bins(
    largest: float, bins: int, upper: float, shift: int, max_bins: int
) -> tuple[int, int]:
    """Return the shift, and the number of merged bins, that hold `largest`."""
    top = bins - 1.0
    if largest > upper:
        top = max(largest * bins / upper, float(bins))
    while math.ldexp(top, -shift) >= max_bins:
        shift += 1
    return shift, max(-(-bins // (1 << shift)), int(math.ldexp(top, -shift)) + 1)


def merge_bins(counts: Tensor, times: int) -> Tensor:
    """Merge neighbouring bins of the last axis in pairs, `times` times over: no count is lost.

    >>> import torch
    >>> merge_bins(torch.tensor([1, 2, 3]), 1)
    tensor([3, 3])
    """
    if times == 0:
        return counts
    step = 1 << min(times, 62)
    size = counts.shape[-1]
    if step >= size:
        return counts.sum(-1, keepdim=True)
    padded = torch.nn.functional.pad(counts, (0, -size % step))
    return padded.reshape(*counts.shape[:-1], -1, step).sum(-1)


def add_counts(a: Tensor, b: Tensor) -> Tensor:
    """Add two count vectors of one bin width; the longer one's length."""
    if a.shape[-1] < b.shape[-1]:
        a, b = b, a
    total = a.clone()
    total[..., : b.shape[-1]] += b
    return total
