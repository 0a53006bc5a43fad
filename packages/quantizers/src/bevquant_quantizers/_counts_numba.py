"""Counting values, compiled: one pass over float32 memory each."""

from __future__ import annotations

from typing import Any

import numpy as np

from bevquant_sparse.runtime.threads import in_parts

from ._jit import SMALLEST_PART, jit

# Without their sign bit float32 values order as integers do, and whatever is not finite lies at
# or above this one. An integer maximum vectorises where one that must respect NaN does not.
NOT_FINITE = 0x7F800000


@jit
def largest_bits(bits: Any) -> Any:
    top: Any = np.int32(0)
    for i in range(bits.shape[0]):
        b = bits[i] & np.int32(0x7FFFFFFF)
        top = max(top, b)
    return top


@jit
def count_magnitudes(
    x: Any, bits: Any, bins: Any, upper: Any, upper_bits: Any, shift: Any, counts: Any
) -> Any:
    """Add x to `counts`; return the bits of the largest value and the number of zeros."""
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
                    # The largest value tells the caller that the last bin holds more than its own.
                    index[i] = np.int32(far) if far < end else end
        for i in range(block.shape[0]):
            parts[i & 3, index[i]] += 1
    for i in range(counts.shape[0]):
        counts[i] += np.int64(parts[0, i]) + parts[1, i] + parts[2, i] + parts[3, i]
    return largest, zeros


def count_signed(values: Any, amax: Any, span: float, counts: Any) -> tuple[int, int]:
    """`count_values` of `_watch`, on all of torch's threads."""
    flat, after = values.reshape(-1), values.shape[2]

    def part(first: int, stop: int) -> Any:
        return _count_part(first, stop, flat, after, amax, span, len(counts))

    parts = in_parts(part, flat.size, SMALLEST_PART)
    for _, _, found in parts:
        counts += found[:-1]
    return sum(int(beyond) for beyond, *_ in parts), sum(int(zeros) for _, zeros, _ in parts)


@jit
def _count_part(
    first: Any, stop: Any, flat: Any, after: Any, amax: Any, span: float, bins: Any
) -> Any:
    """Values beyond and zeros of ``first … stop``, and the histogram with a bin for the rest."""
    # Several histograms and a block of indices, for the reasons in `count_magnitudes`.
    parts = np.zeros((4, bins + 1), np.int32)
    index = np.empty(1024, np.int32)
    per_unit = bins / (2.0 * span)
    last, rest = np.float64(bins - 1), np.float64(bins)
    beyond = zeros = 0
    start = first
    while start < stop:
        row = start // after
        block = flat[start : min(start + 1024, (row + 1) * after, stop)]
        limit = amax[row % len(amax)]
        for i in range(len(block)):
            x = np.float64(block[i])
            zeros += x == 0.0
            beyond += abs(x) > limit
            place = (x + span) * per_unit
            near = place if place > 0.0 else 0.0
            near = near if near < last else last
            near = near if place >= 0.0 else rest
            near = near if place <= rest else rest
            index[i] = np.int32(near)
        for i in range(len(block)):
            parts[i & 3, index[i]] += 1
        start += len(block)
    return beyond, zeros, parts.astype(np.int64).sum(0)
