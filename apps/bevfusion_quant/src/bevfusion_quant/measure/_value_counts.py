"""Counting what a quantizer is handed, in one pass over the values."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["count_values"]

Floats = npt.NDArray[np.float32]


@numba.njit(cache=True)
def count_values(
    values: Floats,
    amax: npt.NDArray[np.float64],
    span: float,
    counts: npt.NDArray[np.int64],
) -> tuple[int, int]:
    """Add the values to a histogram; count those beyond their range and those that are 0.

    Args:
        values: float32 [before, channels, after], the axis in the middle with a range each.
        amax: float64 [channels].
        span: Positive; the histogram covers [−span, span], its last bin includes span.
        counts: int64 [bins], added to in place.

    Returns:
        How many values have |x| > amax, and how many are 0.
    """
    bins = len(counts)
    per_unit = bins / (2.0 * span)
    beyond = zeros = 0
    for i in range(values.shape[0]):
        for channel in range(values.shape[1]):
            limit = amax[channel]
            for k in range(values.shape[2]):
                x = float(values[i, channel, k])
                if x == 0.0:
                    zeros += 1
                if abs(x) > limit:
                    beyond += 1
                place = (x + span) * per_unit
                if 0.0 <= place <= bins:
                    counts[min(int(place), bins - 1)] += 1
    return beyond, zeros
