"""Exact histograms of absolute values, with bins that grow and merge without losing a count."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._jit import SMALLEST_PART, use_numba
from ._memory_order import as_it_lies

# Loading numba for less than this is not worth it.
_SMALLEST_KERNEL = 1 << 14
# Bounds the memory of temporaries, and torch.histc's float32 counts.
_LARGEST_PART = 1 << 24
_LARGEST_PASS = 1 << 30  # the kernel's partial counts are int32


@dataclass(frozen=True)
class AbsHistogram:
    """Counts of absolute values, and what was met on the way.

    A value v lies in base bin ``floor(v · bins / upper)``, in float32 as `torch.histc` computes it
    (`upper` itself lies in the last bin); ``counts[i]`` counts the base bins
    ``i·2**shift … (i+1)·2**shift − 1``. The bin of a value thus depends on (bins, upper, shift)
    alone, whichever batch it came in: histograms of equal (bins, upper) add exactly, in any order.
    """

    # int64 [num_bins], on the CPU. As many as the largest value needs, at least those up to
    # `upper`.
    counts: Tensor
    # Base bins in [0, upper].
    bins: int
    # Upper edge of base bin ``bins − 1``; 0 where no nonzero value has set it yet (every value is
    # then a zero and lies in bin 0).
    upper: float
    # How often neighbouring bins were merged in pairs.
    shift: int
    # Largest finite absolute value, 0 where there is none.
    max: float
    values: int
    # How many of them are 0.
    zeros: int
    # Neither of these two is counted.
    nans: int
    infs: int
    # Number of the first batch that held `max`, where somebody counts batches; else −1.
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


def abs_histogram(
    x: Tensor,
    bins: int = 2048,
    upper: float | None = None,
    *,
    shift: int = 0,
    max_bins: int = 1 << 15,
    backend: str = "auto",
) -> AbsHistogram:
    r"""Count \|x\| in bins of equal width.

    With ``upper=None`` the largest value sets the width and the counts are those of
    ``torch.histc(x.abs(), bins, 0, x.abs().max())``, exact beyond 2²⁴ too. A value above `upper`
    gets bins of the same width appended; where more than `max_bins` would be needed, neighbours
    are merged in pairs (`shift` counts how often), so that memory stays bounded.

    Args:
        x: Values, any shape and device; taken as float32.
        bins: Bins in [0, upper].
        upper: The range of an earlier call on the same quantity; None or 0 to take the largest
            value found.
        shift: `AbsHistogram.shift` of the histogram so far; the result's is never smaller.
        max_bins: Most counts to return.
        backend: "torch", "numba" (one fused pass on the CPU) or "auto": numba where it is
            installed and `x` is large. The results are the same, at any number of threads.

    Returns:
        The histogram; NaN and Inf are left out and their numbers reported.

    Examples:
        >>> import torch
        >>> abs_histogram(torch.tensor([-3.0, 0.0, 1.0, 4.0]), bins=4).counts
        tensor([1, 1, 0, 2])
        >>> grown = abs_histogram(torch.tensor([9.0]), bins=4, upper=4.0)
        >>> grown.counts.numel(), grown.max
        (10, 9.0)
    """
    if bins < 1 or max_bins < bins or shift < 0:
        raise ValueError(
            f"need 1 <= bins <= max_bins and shift >= 0, got bins={bins}, max_bins={max_bins}, "
            f"shift={shift}"
        )
    if upper is not None and not 0.0 <= upper < math.inf:
        raise ValueError(f"upper must be finite and not negative, got {upper}")
    x = x.detach().to(torch.float32)
    fast = use_numba(backend, x.numel() >= _SMALLEST_KERNEL)
    if fast and x.device.type == "cpu" and x.numel():
        found = _one_pass(x, bins, upper or 0.0, shift, max_bins)
        if found is not None:
            return found
    return _torch_histogram(x, bins, upper or 0.0, shift, max_bins)


def _one_pass(x: Tensor, bins: int, upper: float, shift: int, max_bins: int) -> AbsHistogram | None:
    """Return what `abs_histogram` does; None where x is not finite or its range is extreme."""
    from bevquant_sparse.runtime.threads import in_parts

    from . import _counts_numba as kernels

    values = as_it_lies(x).numpy()
    bits = values.view(np.int32)
    if values.size >= _LARGEST_PASS:
        return None
    # The largest value sets the bins: x is read twice.
    if not upper:
        largest = lambda i, j: int(kernels.largest_bits(bits[i:j]))  # noqa: E731
        top = max(in_parts(largest, values.size, SMALLEST_PART))
        upper = _value(top)
        if top >= kernels.NOT_FINITE or not upper:
            return None
    if wide_bins(bins, upper) or shift > 30:
        return None
    edge = np.float32(upper)
    size = min(max_bins, max(2 * bins, 4096))
    while True:

        def part(i: int, j: int, size: int = size, shift: int = shift) -> tuple[int, int, Any]:
            counts = np.zeros(size, np.int64)
            found = kernels.count_magnitudes(
                values[i:j], bits[i:j], bins, edge, edge.view(np.int32), shift, counts
            )
            return int(found[0]), int(found[1]), counts

        found = in_parts(part, values.size, max(SMALLEST_PART, 4 * size))
        top = max(part[0] for part in found)
        if top >= kernels.NOT_FINITE:
            return None
        grown, needed = plan_bins(_value(top), bins, upper, shift, max_bins)
        if grown == shift and needed <= size:
            break
        if grown > 30:
            return None
        shift, size = grown, needed
    counts = torch.from_numpy(sum(part[2] for part in found)[:needed])
    zeros = sum(part[1] for part in found)
    return AbsHistogram(counts, bins, upper, shift, _value(top), values.size, zeros, 0, 0)


def _value(bits: int) -> float:
    return float(np.int32(bits).view(np.float32))


def _torch_histogram(x: Tensor, bins: int, upper: float, shift: int, max_bins: int) -> AbsHistogram:
    a = as_it_lies(x).abs()
    nans = infs = 0
    largest = float(a.max()) if a.numel() else 0.0
    if not math.isfinite(largest):
        nans, infs = int(a.isnan().sum()), int(a.isinf().sum())
        a = a[a.isfinite()]
        largest = float(a.max()) if a.numel() else 0.0
    zeros = a.numel() - int(a.count_nonzero())
    upper = upper or largest
    if upper == 0.0:
        counts = torch.zeros(-(-bins >> shift), dtype=torch.int64)
        counts[0] = zeros
    else:
        shift, size = plan_bins(largest, bins, upper, shift, max_bins)
        counts = torch.zeros(size, dtype=torch.int64)
        if a.device.type == "cpu" and not wide_bins(bins, upper):
            within = merge_bins(_histc(a, bins, upper), shift)
            counts[: within.numel()] = within
            left = a[a > upper] if largest > upper else a[:0]
        else:
            left = a
        for start in range(0, left.numel(), _LARGEST_PART):
            part = left[start : start + _LARGEST_PART]
            index = _bin_index(part, bins, upper, shift, largest)
            counts += torch.bincount(index, minlength=size).cpu()
    return AbsHistogram(counts, bins, upper, shift, largest, a.numel(), zeros, nans, infs)


def _histc(a: Tensor, bins: int, upper: float) -> Tensor:
    """Count the values up to `upper`: torch.histc leaves out the others."""
    counts = torch.zeros(bins, dtype=torch.int64)
    # In float32, which counts exactly up to 2²⁴.
    for start in range(0, a.numel(), _LARGEST_PART):
        counts += torch.histc(a[start : start + _LARGEST_PART], bins, 0, upper).long()
    return counts


def _bin_index(a: Tensor, bins: int, upper: float, shift: int, largest: float) -> Tensor:
    # A one-element tensor: CUDA would multiply by the reciprocal of a number.
    edge = torch.full((1,), upper, dtype=torch.float32, device=a.device)
    if wide_bins(bins, upper):
        a, edge = a.double(), edge.double()
    index = (a * bins / edge).to(torch.int64).clamp_(max=bins - 1) >> min(shift, 62)
    if largest > upper:
        above = a > upper
        far = (a[above].double() * bins / edge.double()).clamp_(min=bins)
        index[above] = (far * 2.0**-shift).to(torch.int64)
    return index
