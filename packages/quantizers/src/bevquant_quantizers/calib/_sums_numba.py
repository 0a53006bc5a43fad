"""Sums over quantization levels, or groups of bins, for every candidate range, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from bevquant_quantizers._jit import jit


@jit
def level_sums(p0: Any, p1: Any, centers: Any, steps: int, by_count: Any, by_value: Any) -> None:
    """Fill in sum_k (2k − 1)·P0[b_k] and sum_k P1[b_k] for the candidates' level bounds b_k."""
    n = centers.shape[0]
    for c in range(n):
        by_count[c] = 0.0
        by_value[c] = 0.0
    # `centers` holds 2i + 1 for each candidate bin i. Candidates are the inner loop, so that
    # nothing is summed across lanes and LLVM vectorises it; unsigned indices need no test.
    for k in range(steps):
        odd = 2.0 * k + 1.0
        width = odd / (4.0 * steps)
        for c in range(n):
            bound = np.uint64(np.int32(centers[c] * width + 0.5))
            by_count[c] += odd * p0[bound]
            by_value[c] += p1[bound]


# What lets LLVM vectorise, five times as fast: candidates in the inner loop, so that nothing is
# summed across lanes; unsigned indices, which need no test for negative ones; and a logarithm made
# of plain operations: x = 2^e·m with m in [sqrt(1/2), sqrt(2)), log m = 2·artanh(s),
# s = (m − 1)/(m + 1), |s| < 0.172, whose series up to s^11 is exact to 2e-11. The exponent becomes
# a float by writing it into the mantissa of 2^52.
_ROOT_HALF = 0x3FE6A09E667F3BCD
_ONE = 0x3FF0000000000000
_MANTISSA = 0x000FFFFFFFFFFFFF
_TWO_52 = 0x4330000000000000


@jit
def group_terms(
    sums: Any, sizes: Any, tried: Any, levels: int, grouped: Any, last_mean: Any
) -> None:
    """Fill in sum_g S_g·log(S_g / m_g), and the last group's mean, for each candidate."""
    n = tried.shape[0]
    left_sum, left_size, total, mantissa, exponent = np.zeros((5, n))
    mean_bits = last_mean.view(np.uint64)
    mantissa_bits = mantissa.view(np.uint64)
    exponent_bits = exponent.view(np.uint64)
    for c in range(n):
        grouped[c] = 0.0
    for g in range(levels):
        part = (g + 1.0) / levels
        for c in range(n):
            # Exact bounds ceil(g·i / levels): `tried` is float64, `levels` a power of two.
            stop = np.uint64(np.int32(np.ceil(tried[c] * part)))
            group = sums[stop] - left_sum[c]
            size = sizes[stop] - left_size[c]
            left_sum[c] += group
            left_size[c] += size
            total[c] = group
            last_mean[c] = max(group / max(size, 1.0), 1.0)
        for c in range(n):
            moved = mean_bits[c] + np.uint64(_ONE - _ROOT_HALF)
            exponent_bits[c] = (moved >> np.uint64(52)) | np.uint64(_TWO_52)
            mantissa_bits[c] = (moved & np.uint64(_MANTISSA)) + np.uint64(_ROOT_HALF)
        for c in range(n):
            s = (mantissa[c] - 1.0) / (mantissa[c] + 1.0)
            z = s * s
            series = 1.0 / 9.0 + z * (1.0 / 11.0)
            series = 1.0 / 5.0 + z * (1.0 / 7.0 + z * series)
            series = 1.0 + z * (1.0 / 3.0 + z * series)
            log = (exponent[c] - 4503599627371519.0) * 0.6931471805599453 + 2.0 * s * series
            grouped[c] += total[c] * log
