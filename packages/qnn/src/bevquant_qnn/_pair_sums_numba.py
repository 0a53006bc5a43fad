"""Sums over pairs of tensors, and values beyond a range, in one pass over memory; needs numba.

Two runs that take turns, each in a thread of its own, have OpenMP wake another team with every
operation: six of torch's on pieces that fit a cache took five times as long as they do alone. Here
a block of values is one task of the threads that all share. Each block has a line of its own, so
that the sums do not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bevquant_sparse.runtime.jit import compiled
from bevquant_sparse.runtime.threads import lines_of


def pair_lines(wanted: Any, got: Any) -> Any:
    """``Σ w², Σ g², Σ w·g, Σ (g − w)²``, float64, for each block of two flat float32 arrays."""
    return lines_of(_pairs, 4, (wanted, got))


def count_beyond(values: Any, amax: float) -> int:
    """How many of a flat float32 array are larger than `amax`, or smaller than its negative."""
    return int(lines_of(_beyond, 1, (values,), amax).sum())


@compiled("void(float32[::1], float32[::1], float64[::1])", any_order=True)
def _pairs(wanted, got, line):
    signal = energy = dot = noise = 0.0
    for i in range(len(got)):
        w, g = np.float64(wanted[i]), np.float64(got[i])
        signal += w * w
        energy += g * g
        dot += w * g
        noise += (g - w) * (g - w)
    line[0], line[1], line[2], line[3] = signal, energy, dot, noise


@compiled("void(float32[::1], float64, float64[::1])")
def _beyond(values, amax, line):
    count = 0
    for i in range(len(values)):
        count += abs(np.float64(values[i])) > amax
    line[0] = count
