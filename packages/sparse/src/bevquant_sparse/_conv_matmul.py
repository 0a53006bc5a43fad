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

from collections.abc import Iterator

import torch
from torch import Tensor

from bevquant_sparse._shapes import Float, Int

_ROWS = 256  # rows of an item: enough to amortise the call, few enough to balance the threads
_ITEMS = 16  # that are gathered and multiplied together: few enough to stay in the cache
_TERMS = 256  # terms of a sum that the BLAS adds
_GROUPS = 4  # items that a transposed product is cut into, by columns
_ALIGNMENT = 64  # bytes: a cache line and the widest vector


class GatheredProduct:
    """``x[sources] @ w`` for many ``sources`` and ``w``, in buffers that are made once.

    Args:
        x: What rows are gathered from.
        columns: Of each ``w``.
    """

    def __init__(self, x: Float[Tensor, "num_rows k"], columns: int) -> None:
        self.x = x
        if x.device.type == "cpu":
            items = max(_ITEMS, torch.get_num_threads())
            self.gathered = _buffer(x, items * _ROWS, _TERMS)
            most = self._rows(min(max(x.shape[1], 1), _TERMS))
            self.made = [x.new_empty(most * columns) for _ in range(2)]

    def __call__(
        self, sources: Int[Tensor, " rows"], w: Float[Tensor, "k columns"]
    ) -> Iterator[tuple[slice, Float[Tensor, "part columns"]]]:
        """Slices of the rows and their products, each of which the next overwrites."""
        x, count = self.x, len(sources)
        if x.device.type != "cpu" or 0 in w.shape:
            yield slice(count), x.index_select(0, sources) @ w
            return
        terms = [slice(start, start + _TERMS) for start in range(0, len(w), _TERMS)]
        kernels = [_buffer(w, w.shape[1], len(w[part])).copy_(w[part].t()) for part in terms]
        step = self._rows(min(len(w), _TERMS))
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            total = self._times(sources[rows], x[:, terms[0]], kernels[0], self.made[0])
            for part, kernel in zip(terms[1:], kernels[1:], strict=True):
                total += self._times(sources[rows], x[:, part], kernel, self.made[1])
            yield rows, total

    def _rows(self, terms: int) -> int:
        """How many rows of so many terms are gathered at once, in whole items."""
        return self.gathered.numel() // terms // _ROWS * _ROWS

    def _times(self, sources: Tensor, x: Tensor, kernel: Tensor, made: Tensor) -> Tensor:
        count, (columns, terms) = len(sources), kernel.shape
        items = max(2, -(-count // _ROWS))
        batch = self.gathered.view(-1)[: items * _ROWS * terms]
        torch.index_select(x, 0, sources, out=batch[: count * terms].view(count, terms))
        batch[count * terms :] = 0
        out = made[: items * _ROWS * columns].view(items, _ROWS, 1, columns)
        batch = batch.view(items, _ROWS, 1, terms)
        _convolve_1x1(
            _channels_first(batch), kernel.view(columns, terms, 1, 1), _channels_first(out)
        )
        return out.view(-1, columns)[:count]


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
    part = g.new_empty(_GROUPS, m, 1, width)
    for start in range(0, rows, _TERMS):
        count = min(_TERMS, rows - start)
        if count < _TERMS:
            kernel[:, count:] = 0
            batch[:, count:] = 0
        kernel[:, :count] = x[start : start + count].t()
        for group in range(_GROUPS):
            columns = g[start : start + count, group * width : (group + 1) * width]
            batch[group, :count, : columns.shape[1]] = columns
        _convolve_1x1(batch.view(_GROUPS, _TERMS, 1, width), kernel.view(m, _TERMS, 1, 1), part)
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


def _channels_first(values: Tensor) -> Tensor:
    return values.permute(0, 3, 1, 2)


def _convolve_1x1(batch: Tensor, kernel: Tensor, out: Tensor) -> None:
    torch.ops.aten._slow_conv2d_forward.output(
        batch, kernel, [1, 1], None, [1, 1], [0, 0], output=out
    )
