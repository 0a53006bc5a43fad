"""One pass over float32 memory: absolute value, largest value, zeros and histogram."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._abs_histogram import AbsHistogram, plan_bins, wide_bins
from ._jit import jit
from ._threads import run_parts

# Without their sign bit float32 values order as integers do, and whatever is not finite lies at
# or above this one. An integer maximum vectorises where one that must respect NaN does not.
_NOT_FINITE = 0x7F800000
# The partial counts are int32.
_LARGEST_PART = 1 << 30


@jit
def _largest_bits(bits: Any) -> Any:
    top: Any = np.int32(0)
    for i in range(bits.shape[0]):
        b = bits[i] & np.int32(0x7FFFFFFF)
        top = max(top, b)
    return top


@jit
def _count(
    x: Any, bits: Any, bins: Any, upper: Any, upper_bits: Any, shift: Any, counts: Any
) -> Any:
    """Add x to `counts`; return the bits of the largest value and the number of zeros.

    Values at and above the last count go there: the caller sees from the largest value that
    there were such, and that `counts` was too short.
    """
    # Four partial histograms: equal values in a row (the zeros of a ReLU) would otherwise wait
    # for one another's increment.
    parts = np.zeros((4, counts.shape[0]), np.int32)
    index = np.empty(1024, np.int32)
    last = np.float32(bins - 1)
    f_bins = np.float32(bins)
    end = counts.shape[0] - 1
    largest: Any = np.int32(0)
    zeros: Any = 0
    for start in range(0, x.shape[0], 1024):
        block, block_bits = x[start : start + 1024], bits[start : start + 1024]
        top: Any = np.int32(0)
        zero = np.int32(0)
        for i in range(block.shape[0]):
            b = block_bits[i] & np.int32(0x7FFFFFFF)
            top = max(top, b)
            zero += np.int32(b == 0)
        zeros += zero
        largest = max(largest, top)
        if top <= upper_bits:
            for i in range(block.shape[0]):
                t = abs(block[i]) * f_bins / upper
                t = last if t > last else t
                index[i] = np.int32(t) >> shift
        else:
            for i in range(block.shape[0]):
                a = abs(block[i])
                if a <= upper:
                    t = a * f_bins / upper
                    t = last if t > last else t
                    index[i] = np.int32(t) >> shift
                else:
                    far = max(np.float64(a) * bins / np.float64(upper), np.float64(bins))
                    far *= 2.0 ** -np.float64(shift)
                    index[i] = np.int32(far) if far < end else end
        for i in range(block.shape[0]):
            parts[i & 3, index[i]] += 1
    for i in range(counts.shape[0]):
        counts[i] += np.int64(parts[0, i]) + parts[1, i] + parts[2, i] + parts[3, i]
    return largest, zeros


def one_pass(x: Tensor, bins: int, upper: float, shift: int, max_bins: int) -> AbsHistogram | None:
    """Return what `abs_histogram` does; None where x is not finite or its range is extreme.

    Once `upper` is known this reads x once; before, and where x outgrows twice the bins, twice.

    Args:
        x: float32, contiguous, on the CPU, fewer than 2³⁰ values.
        bins: Bins in [0, upper].
        upper: Range of the base bins, 0 to take the largest value.
        shift: Merges so far.
        max_bins: Most counts.
    """
    values = x.detach().reshape(-1).numpy()
    bits = values.view(np.int32)
    if values.size >= _LARGEST_PART:
        return None
    if not upper:
        top = max(run_parts(lambda i, j: int(_largest_bits(bits[i:j])), values.size))
        upper = _value(top)
        if top >= _NOT_FINITE or not upper:
            return None
    if wide_bins(bins, upper) or shift > 30:
        return None
    edge = np.float32(upper)
    size = min(max_bins, max(2 * bins, 4096))
    while True:

        def part(i: int, j: int, size: int = size, shift: int = shift) -> tuple[int, int, Any]:
            counts = np.zeros(size, np.int64)
            found = _count(values[i:j], bits[i:j], bins, edge, edge.view(np.int32), shift, counts)
            return int(found[0]), int(found[1]), counts

        found = run_parts(part, values.size)
        top = max(part[0] for part in found)
        if top >= _NOT_FINITE:
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
