"""Maximum pooling over two axes with the channels side by side, on all of torch's threads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bevquant_sparse.runtime import workspace
from bevquant_sparse.runtime.jit import compiled
from bevquant_sparse.runtime.threads import in_parts

_Pair = tuple[int, int]


def max_pool(
    x: Tensor, windows: _Pair, kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair
) -> Tensor:
    """Maxima of int8 ``[batch, channels, *grid]``; the result is channels-last in memory.

    `windows` says how many there are along each axis; none may lie outside of the input. The first
    one begins `padding` before it.
    """
    pixels = x.movedim(1, -1).contiguous().numpy()
    batch, channels = x.shape[:2]
    out = workspace.empty((batch, *windows, channels), "int8")
    in_parts(
        lambda first, stop: _max_rows(
            first, stop, pixels, *kernel, *stride, *padding, *dilation, out
        ),
        batch * windows[0],
        _ROWS,
    )
    return torch.from_numpy(out).movedim(-1, 1)


_ROWS = 4  # of windows, in a part of the work


@compiled(
    "void(int64, int64, int8[:, :, :, ::1], int64, int64, int64, int64, int64, int64, int64, "
    "int64, int8[:, :, :, ::1])"
)
def _max_rows(
    first, stop, x, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, step_h, step_w, out
):
    for row in range(first, stop):
        b, i = row // out.shape[1], row % out.shape[1]
        for j in range(out.shape[2]):
            best: Any = out[b, i, j]
            best[:] = -128
            for u in range(kernel_h):
                r = i * stride_h - pad_h + u * step_h
                if r < 0 or r >= x.shape[1]:
                    continue
                for v in range(kernel_w):
                    c = j * stride_w - pad_w + v * step_w
                    if c < 0 or c >= x.shape[2]:
                        continue
                    seen = x[b, r, c]
                    for channel in range(len(best)):
                        best[channel] = max(best[channel], seen[channel])
