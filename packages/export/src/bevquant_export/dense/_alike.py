"""Whether two float outputs are equal up to rounding."""

from __future__ import annotations

import numpy as np

from bevquant_export.dense._graph import Array

HALF = 2.0**-6  # float16 functions
_ENERGY = 1e-4
_PIECE = 1 << 15  # values that are looked at in float64 at a time: they stay in the cache
_NOTHING = 1e-4  # what normalising a constant makes of rounding


def alike(want: Array, got: Array, tolerance: float) -> bool:
    """Whether two outputs differ by at most a share of the largest value, or by noise."""
    if want.shape != got.shape:
        return False
    flat = want.reshape(-1), got.reshape(-1)
    found = [
        _gaps(*(values[first : first + _PIECE].astype(np.float64) for values in flat))
        for first in range(0, want.size, _PIECE)
    ]
    sums = np.array(found).reshape(-1, 4)
    (most, top), (energy, power) = sums[:, :2].max(0, initial=0.0), sums[:, 2:].sum(0)
    return bool(most <= tolerance * top + _NOTHING or energy <= _ENERGY * power)


def _gaps(want: Array, got: Array) -> tuple[float, float, float, float]:
    """Largest difference, largest finite expected value, energy of both."""
    same = (want == got) | (np.isnan(want) & np.isnan(got))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(want - got))
    finite = np.where(np.isfinite(want), np.abs(want), 0.0)
    return apart.max(), finite.max(), (apart**2).sum(), (finite**2).sum()
