"""Matrix products whose result does not depend on the number of threads.

A BLAS splits one product over its threads as it likes, and the split changes the rounding: with
MKL, ``[255, 5] @ [5, 33]`` gives other bits on one thread than on two. Here the split is fixed by
the operands' shapes: the product is cut into batch items, and each item is one sequential GEMM on
one thread. torch's native convolution does exactly that with a 1×1 kernel (a parallel loop over
the batch, a GEMM inside), so it is the loop used. On other devices than the CPU the plain product
is deterministic already.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from bevquant_sparse._shapes import Float

_ROWS = 256  # rows of one sequential GEMM: enough to amortise the call, few enough to balance
_COLUMN_GROUPS = 4  # sequential GEMMs that one transposed product is cut into


def matmul(x: Float[Tensor, "rows k"], w: Float[Tensor, "k n"]) -> Float[Tensor, "rows n"]:
    """``x @ w``, bit-identical at any number of threads."""
    rows, inner = x.shape
    if x.device.type != "cpu" or rows == 0 or 0 in w.shape:
        return x @ w
    # Two items at least: the convolution hands a lone one to the BLAS with all threads.
    size = max(1, min(_ROWS, -(-rows // 2)))
    items = max(2, -(-rows // size))
    padded = pad(x, (0, 0, 0, items * size - rows)) if items * size != rows else x.contiguous()
    batch = padded.view(items, size, 1, inner).permute(0, 3, 1, 2)
    kernel = w.t().contiguous().view(w.shape[1], 1, 1, inner).permute(0, 3, 1, 2)
    out = _convolve_1x1(batch, kernel)
    return out.permute(0, 2, 3, 1).reshape(items * size, w.shape[1])[:rows]


def matmul_transposed(
    x: Float[Tensor, "rows m"], g: Float[Tensor, "rows n"]
) -> Float[Tensor, "m n"]:
    """``x.T @ g``, bit-identical at any number of threads."""
    (rows, m), n = x.shape, g.shape[1]
    if x.device.type != "cpu" or 0 in (rows, m, n):
        return x.t() @ g
    width = -(-n // _COLUMN_GROUPS)
    if width * _COLUMN_GROUPS != n:
        g = pad(g, (0, width * _COLUMN_GROUPS - n))
    batch = g.view(rows, _COLUMN_GROUPS, width).permute(1, 0, 2).contiguous()
    out = _convolve_1x1(
        batch.view(_COLUMN_GROUPS, rows, 1, width), x.t().contiguous().view(m, rows, 1, 1)
    )
    columns = out.view(_COLUMN_GROUPS, m, width).permute(1, 0, 2)
    return columns.reshape(m, width * _COLUMN_GROUPS)[:, :n]


def column_sum(g: Float[Tensor, "rows n"]) -> Float[Tensor, " n"]:
    """``g.sum(0)``, bit-identical at any number of threads."""
    if g.device.type != "cpu":
        return g.sum(0)
    return matmul_transposed(g.new_ones(g.shape[0], 1), g)[0]


def _convolve_1x1(batch: Tensor, kernel: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten._slow_conv2d_forward(batch, kernel, [1, 1], None, [1, 1], [0, 0])
    return out
