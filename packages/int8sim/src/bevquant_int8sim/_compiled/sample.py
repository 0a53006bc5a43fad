"""Bilinear samples of integers, each of rows of channels, on all of torch's threads.

A position's four pixels are read once, channels side by side, where torch's operations write and
read a sum of eight bytes a channel a dozen times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bevquant_sparse.runtime.jit import compiled
from bevquant_sparse.runtime.threads import in_parts

_POSITIONS = 256  # of a part of the work


def sample(
    rows: Tensor, first: Tensor, at: Sequence[Tensor], sizes: Sequence[int], steps: Sequence[int],
    out: Tensor, weights: Tensor | None = None,
) -> None:  # fmt: skip
    """Write sums of samples to `out`, int32 ``[positions, channels]``, or add weighted ones.

    `rows` are int8 ``[pixels, channels]``, `first` the row of each position's first pixel, `steps`
    the rows from a pixel to the next one down and across. `at` are positions in pixels along both
    axes with 12 fraction bits, int32. With `weights`, int32 ``[positions]``, sums are rounded half
    to even to 8 fraction bits, and their products are added.
    """
    given = torch.empty(0, dtype=torch.int32) if weights is None else weights.contiguous()
    arrays = [t.numpy() for t in (rows, first, *at, given, out)]
    in_parts(
        lambda start, stop: _sample(start, stop, *arrays, *sizes, *steps), len(first), _POSITIONS
    )


@compiled(
    "void(int64, int64, int8[:, ::1], int64[::1], int32[::1], int32[::1], int32[::1], "
    "int32[:, ::1], int64, int64, int64, int64)"
)
def _sample(start, stop, rows, first, ys, xs, weights, out, height, width, down, across):
    for n in range(start, stop):
        y, x = ys[n] >> 12, xs[n] >> 12
        lower, right = ys[n] & 4095, xs[n] & 4095
        # A pixel outside of the map is any pixel inside, with weight 0.
        upper = 4096 - lower if 0 <= y < height else 0
        left = 4096 - right if 0 <= x < width else 0
        lower = lower if y + 1 < height else 0
        right = right if x + 1 < width else 0
        top = first[n] + min(max(y, 0), height - 1) * down
        bottom = first[n] + min(y + 1, height - 1) * down
        near, far = min(max(x, 0), width - 1) * across, min(x + 1, width - 1) * across
        a, b, c, d = rows[top + near], rows[top + far], rows[bottom + near], rows[bottom + far]
        wa, wb = np.int32(upper * left), np.int32(upper * right)
        wc, wd = np.int32(lower * left), np.int32(lower * right)
        made = out[n]
        if len(weights):
            weight = weights[n]
            for i in range(len(made)):
                total = np.int32(a[i] * wa + b[i] * wb + c[i] * wc + d[i] * wd)
                half = np.int32(total + 32767 + ((total >> 16) & 1))
                made[i] = np.int32(made[i] + (half >> 16) * weight)
        else:
            for i in range(len(made)):
                made[i] = np.int32(a[i] * wa + b[i] * wb + c[i] * wc + d[i] * wd)
