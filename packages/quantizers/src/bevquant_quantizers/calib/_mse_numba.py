"""Sums over quantization levels for every candidate range, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from bevquant_quantizers._jit import jit

__all__ = ["level_sums"]


@jit
def level_sums(p0: Any, p1: Any, centers: Any, steps: int, by_count: Any, by_value: Any) -> None:
    """Fill in sum_k (2k − 1)·P0[b_k] and sum_k P1[b_k] for the candidates' level bounds b_k.

    `centers` holds 2i + 1 for each candidate bin i, in float64. Candidates are the inner loop, so
    that nothing is summed across lanes and LLVM vectorises it; unsigned indices need no test.
    """
    n = centers.shape[0]
    for c in range(n):
        by_count[c] = 0.0
        by_value[c] = 0.0
    for k in range(steps):
        odd = 2.0 * k + 1.0
        width = odd / (4.0 * steps)
        for c in range(n):
            bound = np.uint64(np.int32(centers[c] * width + 0.5))
            by_count[c] += odd * p0[bound]
            by_value[c] += p1[bound]
