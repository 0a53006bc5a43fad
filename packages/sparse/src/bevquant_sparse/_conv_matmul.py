"""Matrix products whose bits depend on their operands alone, not on threads or addresses.

A BLAS picks its code by the shape, by the alignment of its operands, by the number of threads (MKL
on Intel's CPUs even for a product that one thread computes), and cuts long sums into pieces as it
likes; each of these changes the rounding. So it is left none of these choices:

- Every product is cut into items of one fixed shape: 256 rows, zeros behind the last one.
- Operands are copied to buffers of their own, each at a multiple of 64 bytes.
- Items are multiplied as a batch (`torch.bmm`) of at least as many as there are threads, and of two
  at least: each is then one sequential product on one thread, where fewer would be cut.
- No sum within an item is longer than 256 terms, which is less than any BLAS cuts; longer ones are
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
_ALIGNMENT = 64  # bytes: a cache line and the widest vector


class GatheredProduct:
    """``x[sources] @ w`` for many ``sources`` and ``w``, in buffers that are made once."""

    def __init__(self, x: Float[Tensor, "num_rows k"], columns: int) -> None:
        self.x = x
        if x.device.type == "cpu":
            self.fewest = _fewest()
            self.gathered = _buffer(x, max(_ITEMS, self.fewest) * _ROWS, _TERMS)
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
        kernels = [_buffer(w, *w[part].shape).copy_(w[part]) for part in terms]
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
        count, (terms, columns) = len(sources), kernel.shape
        items = max(self.fewest, -(-count // _ROWS))
        batch = self.gathered.view(-1)[: items * _ROWS * terms]
        torch.index_select(x, 0, sources, out=batch[: count * terms].view(count, terms))
        batch[count * terms :] = 0
        out = made[: items * _ROWS * columns].view(items, _ROWS, columns)
        _multiply(batch.view(items, _ROWS, terms), kernel.expand(items, terms, columns), out)
        return out.view(-1, columns)[:count]


def matmul_transposed(
    x: Float[Tensor, "rows m"], g: Float[Tensor, "rows n"]
) -> Float[Tensor, "m n"]:
    """``x.T @ g``."""
    (rows, m), n = x.shape, g.shape[1]
    if x.device.type != "cpu" or 0 in (rows, m, n):
        return x.t() @ g
    parts = -(-rows // _TERMS)
    items = max(_fewest(), min(parts, _ITEMS))
    lanes = _ALIGNMENT // x.element_size()
    width = -(-n // lanes) * lanes
    left = _buffer(x, items * m, _TERMS).zero_().view(items, m, _TERMS)
    right = _buffer(g, items * _TERMS, width).zero_().view(items, _TERMS, width)
    made, total = g.new_empty(items, m, width), g.new_zeros(m, width)
    for first in range(0, parts, items):
        some = range(first, min(first + items, parts))
        for place, part in enumerate(some):
            start = part * _TERMS
            count = min(_TERMS, rows - start)
            left[place, :, :count] = x[start : start + count].t()
            right[place, :count, :n] = g[start : start + count]
            left[place, :, count:], right[place, count:] = 0, 0
        _multiply(left, right, made)
        for product in made[: len(some)]:
            total += product
    return total[:, :n]


def column_sum(g: Float[Tensor, "rows n"]) -> Float[Tensor, " n"]:
    """``g.sum(0)``."""
    if g.device.type != "cpu":
        return g.sum(0)
    return matmul_transposed(g.new_ones(g.shape[0], 1), g)[0]


def _fewest() -> int:
    """Items of a batch, so that no BLAS cuts one of them."""
    return max(2, torch.get_num_threads())


def _buffer(like: Tensor, rows: int, columns: int) -> Tensor:
    """Memory for ``[rows, columns]`` at a multiple of 64 bytes."""
    size = like.element_size()
    raw = like.new_empty(rows * columns + _ALIGNMENT // size)
    skip = -raw.data_ptr() % _ALIGNMENT // size
    return raw[skip : skip + rows * columns].view(rows, columns)


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    torch.bmm(left, right, out=out)
