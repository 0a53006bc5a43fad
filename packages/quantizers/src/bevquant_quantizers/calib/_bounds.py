"""Bounds of the bins that fall to each level, for many candidate ranges at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Bounds = npt.NDArray[np.int32]

# Arrays of at most 96 KiB: above 128 KiB every one costs fresh pages from the system.
CHUNK = 12_288
_LARGEST_TABLE = 1 << 21


def in_chunks(
    bounds: Callable[[int, int, int, int], Bounds], first: int, number: int, step: int, levels: int
) -> Iterator[tuple[slice, Bounds]]:
    """Yield rows of candidates with their bounds, from one table while that is small.

    `bounds` takes the first candidate, their number, the step between them and the levels of each,
    all in bins, and depends on nothing else.
    """
    table = (
        _table(bounds, first, number, step, levels) if number * levels <= _LARGEST_TABLE else None
    )
    size = max(CHUNK // levels, 1)
    for start in range(0, number, size):
        stop = min(start + size, number)
        if table is not None:
            yield slice(start, stop), table[start:stop]
        else:
            yield slice(start, stop), bounds(first + start * step, stop - start, step, levels)


@lru_cache(maxsize=4)
def _table(
    bounds: Callable[[int, int, int, int], Bounds], first: int, number: int, step: int, levels: int
) -> Bounds:
    return bounds(first, number, step, levels)
