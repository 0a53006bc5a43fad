"""Matrix products whose bits depend on their operands alone, not on threads or addresses.

A BLAS picks its code by the shape, by the alignment of its operands, by the number of threads, and
cuts long sums into pieces as it likes; each of these changes the rounding. So it is left none of
these choices:

- Every product is cut into items of one fixed shape: 256 rows, zeros behind the last one.
- Operands are copied to buffers of their own, each at a multiple of 64 bytes.
- Each item is one sequential GEMM on one thread. torch's native convolution does that with a 1×1
  kernel (a parallel loop over the batch, a GEMM inside), so it is the loop used; it gets two items
  at least, as it hands a lone one to the BLAS with all threads.
- No sum within a GEMM is longer than 256 terms, which is less than any BLAS cuts; longer ones are
  put together here, in order.

Which BLAS and which instructions it uses still shows in the last bit, as everywhere in torch: for
equal bits on CPUs of several kinds there is the numba backend, which calls none. On other devices
than the CPU the plain product is deterministic already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bevquant_sparse._shapes import Float

_ROWS = 256  # rows of an item: enough to amortise the call, few enough to balance the threads
_TERMS = 256  # terms of a sum that the BLAS adds
_GROUPS = 4  # items that a transposed product is cut into, by columns
_ALIGNMENT = 64  # bytes: a cache line and the widest vector


def matmul(
    x: Float[Tensor, "num_rows k"], w: Float[Tensor, "k n"], rows: Tensor | None = None
) -> Float[Tensor, "rows n"]:
    """``x @ w``, or ``x[rows] @ w``."""
    count = x.shape[0] if rows is None else rows.shape[0]
    if x.device.type != "cpu" or count == 0 or 0 in w.shape:
        return (x if rows is None else x.index_select(0, rows)) @ w
    out = _rows_times(x[:, :_TERMS], w[:_TERMS], rows)
    for start in range(_TERMS, w.shape[0], _TERMS):
        out.add_(_rows_times(x[:, start : start + _TERMS], w[start : start + _TERMS], rows))
    return out


def _rows_times(x: Tensor, w: Tensor, rows: Tensor | None) -> Tensor:
    count, (inner, columns) = (x.shape[0] if rows is None else rows.shape[0]), w.shape
    items = max(2, -(-count // _ROWS))
    block = _buffer(x, items * _ROWS, inner)
    if rows is None:
        block[:count] = x
    else:
        torch.index_select(x, 0, rows, out=block[:count])
    block[count:] = 0
    kernel = _buffer(w, columns, inner).copy_(w.t())
    out = _convolve_1x1(
        block.view(items, _ROWS, 1, inner).permute(0, 3, 1, 2),
        kernel.view(columns, 1, 1, inner).permute(0, 3, 1, 2),
    )
    return out.permute(0, 2, 3, 1).reshape(items * _ROWS, columns)[:count]


def matmul_transposed(
    x: Float[Tensor, "rows m"], g: Float[Tensor, "rows n"]
) -> Float[Tensor, "m n"]:
    """``x.T @ g``."""
    (rows, m), n = x.shape, g.shape[1]
    if x.device.type != "cpu" or 0 in (rows, m, n):
        return x.t() @ g
    lanes = _ALIGNMENT // x.element_size()
    width = -(-n // (_GROUPS * lanes)) * lanes
    batch = _buffer(g, _GROUPS * _TERMS, width).zero_().view(_GROUPS, _TERMS, width)
    kernel = _buffer(x, m, _TERMS).zero_()
    total = g.new_zeros(_GROUPS, m, width)
    for start in range(0, rows, _TERMS):
        count = min(_TERMS, rows - start)
        if count < _TERMS:
            kernel[:, count:] = 0
            batch[:, count:] = 0
        kernel[:, :count] = x[start : start + count].t()
        for group in range(_GROUPS):
            columns = g[start : start + count, group * width : (group + 1) * width]
            batch[group, :count, : columns.shape[1]] = columns
        part = _convolve_1x1(batch.view(_GROUPS, _TERMS, 1, width), kernel.view(m, _TERMS, 1, 1))
        total.add_(part.view(_GROUPS, m, width))
    return total.permute(1, 0, 2).reshape(m, _GROUPS * width)[:, :n]


def column_sum(g: Float[Tensor, "rows n"]) -> Float[Tensor, " n"]:
    """``g.sum(0)``."""
    if g.device.type != "cpu":
        return g.sum(0)
    return matmul_transposed(g.new_ones(g.shape[0], 1), g)[0]


def _buffer(like: Tensor, rows: int, columns: int) -> Tensor:
    """Memory for ``[rows, columns]`` at a multiple of 64 bytes."""
    size = like.element_size()
    raw = like.new_empty(rows * columns + _ALIGNMENT // size)
    skip = -raw.data_ptr() % _ALIGNMENT // size
    return raw[skip : skip + rows * columns].view(rows, columns)


def _convolve_1x1(batch: Tensor, kernel: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten._slow_conv2d_forward(batch, kernel, [1, 1], None, [1, 1], [0, 0])
    return out
