"""The range of least Kullback-Leibler divergence."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["entropy_amax"]


def entropy_amax(
    counts: npt.NDArray[np.int64],
    edges: npt.NDArray[np.float32],
    num_bits: int,
    unsigned: bool,
    stride: int,
    start_bin: int,
) -> float:
    bins = counts.copy()
    if len(bins) > 1:
        bins[0] = bins[1]
    levels = 1 << (num_bits - 1 + int(unsigned))
    candidates = list(range(start_bin, len(bins) + 1, stride)) or [len(bins)]
    scores = np.array([_divergence(bins, i, levels) for i in candidates])
    return float(edges[candidates[len(scores) - 1 - int(np.argmin(scores[::-1]))]])


def _divergence(bins: npt.NDArray[np.int64], i: int, levels: int) -> float:
    group = np.arange(i) * levels // i
    filled = bins[:i] > 0
    sums = np.bincount(group, bins[:i], levels)
    sizes = np.bincount(group, filled, levels)
    q = np.where(filled, (sums / np.maximum(sizes, 1))[group], 0.0)
    p = bins[:i].astype(np.float64)
    p[-1] += bins[i:].sum()
    if p.sum() == 0 or q.sum() == 0:
        return float("inf")
    p, q = p / p.sum(), q / q.sum()
    some = p > 0
    if (q[some] == 0).any():
        return float("inf")
    return float((p[some] * np.log(p[some] / q[some])).sum())
