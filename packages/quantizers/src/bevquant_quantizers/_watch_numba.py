"""Counting what a quantizer is handed, compiled."""

from __future__ import annotations

from typing import Any

from ._jit import jit


@jit
def count(values: Any, amax: Any, span: float, counts: Any) -> Any:
    """`count_values`, in one pass over the values."""
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
