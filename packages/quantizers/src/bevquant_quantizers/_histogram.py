"""Counting absolute values in bins, exactly, by torch or by one fused pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._abs_histogram import AbsHistogram, merge_bins, plan_bins, wide_bins
from ._jit import use_numba

# Loading numba for less than this is not worth it.
_SMALLEST_KERNEL = 1 << 14
# Bounds the memory of temporaries, and torch.histc's float32 counts.
_LARGEST_PART = 1 << 24


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

    Raises:
        ValueError: `bins`, `shift` or `upper` out of range, `max_bins` below `bins`, or an
            unknown backend.

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
        from ._histogram_numba import one_pass

        found = one_pass(x, bins, upper or 0.0, shift, max_bins)
        if found is not None:
            return found
    return _torch_histogram(x, bins, upper or 0.0, shift, max_bins)


def _torch_histogram(x: Tensor, bins: int, upper: float, shift: int, max_bins: int) -> AbsHistogram:
    a = x.reshape(-1).abs()
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
    """Count the values up to `upper`: torch.histc leaves out the others.

    It counts in float32, which is exact up to 2²⁴.
    """
    counts = torch.zeros(bins, dtype=torch.int64)
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
