"""The range of least Kullback-Leibler divergence, from a histogram."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bevquant_quantizers._jit import has_numba
from bevquant_quantizers.calib._bounds import in_chunks

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# float64 leaves the divergences from prefix sums exact to about 1e-14, the compiled logarithm to
# 2e-11.
_TOLERANCE = 1e-10


def entropy_amax(
    counts: npt.NDArray[np.int64],
    edges: npt.NDArray[np.float32],
    num_bits: int,
    unsigned: bool,
    stride: int,
    start_bin: int,
    backend: str = "auto",
) -> float:
    r"""Return the edge i at which the histogram loses least information by quantization.

    .. math:: \sum_{j<i} p_j \log (p_j / q_j)

    p is the histogram up to bin i with everything above added to its last bin; q is the histogram
    up to i with the nonzero bins of each of 2^(bits − 1) groups (2^bits unsigned) set to their
    mean; both normalized. As upstream, bin 0 counts as much as bin 1 (zeros quantize exactly), and
    of equal candidates the last wins. All divergences are found from prefix sums; those within
    1e-10 of the least are computed again term by term, as upstream does.

    Args:
        counts: int64 [bins], left as it is.
        edges: float32 [bins + 1].
        num_bits: Bits of the integer.
        unsigned: Whether the integers start at 0.
        stride: Step between candidates, in bins.
        start_bin: First candidate; where there are fewer bins, the last edge is returned.
        backend: ``"numba"``, ``"numpy"``, or ``"auto"``: numba where it is installed.
    """
    bins = counts.copy()
    if len(bins) > 1:
        bins[0] = bins[1]
    levels = 1 << max(num_bits - 1 + int(unsigned), 0)
    start_bin = max(start_bin, 1)
    tried = np.arange(start_bin, len(bins) + 1, stride)
    if not len(tried) or not bins.any():
        return float(edges[-1])
    scores = _divergences(bins, tried, levels, backend)
    least = scores.min()
    close = tried[scores <= least + _TOLERANCE]
    if len(close) > 1:
        exact = np.array([_divergence(bins, int(i), levels) for i in close])
        close = close[exact == exact.min()]
    return float(edges[close[-1]])


def _divergence(bins: Ints, i: int, levels: int) -> float:
    """The divergence of one candidate, term by term in upstream's order."""
    group = np.arange(i) * levels // i
    filled = bins[:i] != 0
    sums = np.bincount(group, bins[:i], levels)
    sizes = np.bincount(group, filled, levels)
    q = np.where(filled, (sums / np.maximum(sizes, 1))[group], 0.0)
    p = bins[:i].astype(np.float64)
    p[-1] += bins[i:].sum()
    if q.sum() == 0:
        return float("inf")
    p, q = p / p.sum(), q / q.sum()
    terms = np.zeros(i)
    some = p > 0
    if (q[some] == 0).any():
        return float("inf")
    ratio = p[some] / q[some]
    near = (ratio > 0.5) & (ratio < 2)
    log = np.where(near, np.log1p((p[some] - q[some]) / q[some]), np.log(ratio))
    terms[some] = p[some] * log
    return float(terms.sum())


# With S_g, m_g the sum and the number of nonzero bins of group g, T the total, R the sum above i:
#   T (D + log T - log (T - R))
#     = sum_{j<i} r_j log r_j - sum_g S_g log(S_g / m_g) - R log(S_l / m_l)
# where r_j is n_j, but n_{i-1} + R in the last bin, and l the last group.


def _divergences(bins: Ints, tried: Ints, levels: int, backend: str) -> Floats:
    sums, sizes, own = np.zeros((3, len(bins) + 1))
    np.cumsum(bins, out=sums[1:])
    np.cumsum(bins != 0, out=sizes[1:])
    np.cumsum(_x_log_x(bins.astype(np.float64)), out=own[1:])
    total = sums[-1]
    inside = sums[tried]
    above = total - inside
    last = bins[tried - 1].astype(np.float64)
    grouped, last_mean = np.empty((2, len(tried)))
    if backend == "numba" or (backend == "auto" and has_numba()):
        from ._sums_numba import group_terms

        group_terms(sums, sizes, tried.astype(np.float64), levels, grouped, last_mean)
    else:
        step = int(tried[1] - tried[0]) if len(tried) > 1 else 1
        for rows, bounds in in_chunks(_bounds, int(tried[0]), len(tried), step, levels):
            grouped[rows], last_mean[rows] = _group_terms(sums, sizes, bounds)
    # With fewer bins than groups the last group is empty; the last bin then is its own.
    last_mean = np.where(tried < levels, last, last_mean)
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = own[tried] - _x_log_x(last) + _x_log_x(last + above) - grouped
        lost = np.where(above > 0, above * np.log(last_mean), 0.0)
        scores = (bits - lost) / total - np.log(total) + np.log(inside)
    # Values above the range land in a bin that the quantized histogram leaves empty.
    return np.where((inside == 0) | ((last == 0) & (above > 0)), np.inf, scores)


def _x_log_x(x: Floats) -> Floats:
    return x * np.log(np.maximum(x, 1.0))


def _group_terms(
    sums: Floats, sizes: Floats, bounds: npt.NDArray[np.int32]
) -> tuple[Floats, Floats]:
    total = np.diff(sums.take(bounds))
    size = np.diff(sizes.take(bounds))
    mean = total / np.maximum(size, 1.0)
    logs = np.log(np.maximum(mean, 1.0))  # a nonzero mean of counts is at least 1
    return np.einsum("ij,ij->i", total, logs), mean[:, -1]


def _bounds(first: int, number: int, step: int, levels: int) -> npt.NDArray[np.int32]:
    """First bin of each group, ceil(g·i / levels), for each candidate i; i itself at the end."""
    tried = first + step * np.arange(number, dtype=np.int64)
    groups = np.arange(levels + 1, dtype=np.int64)
    return (-(-tried[:, None] * groups // levels)).astype(np.int32)
