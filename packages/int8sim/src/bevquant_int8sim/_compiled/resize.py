"""Bilinear resizing of pixels with their channels side by side, on all of torch's threads.

A task is one line of the result. Each of its pixels mixes four pixels of the input, channel by
channel in float64: the two lines first, then the two columns, the multiplier last, in the order of
the torch operations that this stands in for and without fused multiply-adds, so that no bit
differs. Whole pixels are read and written one behind the other, which the compiler turns into
vectors; torch's operations need a dozen passes over eight bytes a value.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bevquant_int8sim._compiled.channels_last import pixel_rows
from bevquant_sparse.runtime import workspace
from bevquant_sparse.runtime.jit import compiled
from bevquant_sparse.runtime.threads import share

_Between = tuple[Tensor, Tensor, Tensor]


def bilinear(x: Tensor, rows: _Between, columns: _Between, factor: float) -> Tensor:
    """Resize int8 ``[batch, channels, *grid]``; the result is channels-last in memory.

    `rows` and `columns` give for each line of the result the two that it lies between, and the
    second's weight. Values are multiplied by `factor` before they are rounded, half to even.
    """
    batch, channels = x.shape[:2]
    pixels = pixel_rows(x, channels).reshape(batch, *x.shape[2:], channels)
    sizes = len(rows[2]), len(columns[2])
    out = workspace.empty((batch, *sizes, channels), "int8")
    axes = [values.numpy() for axis in (rows, columns) for values in axis]
    share(lambda line: _line(line, pixels, *axes, factor, out), batch * sizes[0])
    return torch.from_numpy(out).movedim(-1, 1)


@compiled(
    "void(int64, int8[:, :, :, ::1], int64[::1], int64[::1], float64[::1], int64[::1], "
    "int64[::1], float64[::1], float64, int8[:, :, :, ::1])"
)
def _line(line, x, tops, bottoms, shares, lefts, rights, parts, factor, out):
    b, i = line // out.shape[1], line % out.shape[1]
    above, below = x[b, tops[i]], x[b, bottoms[i]]
    down = shares[i]
    up = 1.0 - down
    for j in range(out.shape[2]):
        left, right, across = lefts[j], rights[j], parts[j]
        back = 1.0 - across
        made = out[b, i, j]
        for c in range(len(made)):
            near = above[left, c] * up + below[left, c] * down
            far = above[right, c] * up + below[right, c] * down
            value = np.rint((near * back + far * across) * factor)
            value = -128.0 if value < -128.0 else value
            value = 127.0 if value > 127.0 else value
            made[c] = np.int8(np.int32(value))
