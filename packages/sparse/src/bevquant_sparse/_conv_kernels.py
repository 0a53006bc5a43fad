"""The float32 CPU kernels: blocks of a plan through register tiles.

A plan is the order in which a rulebook's pairs are walked: output rows are cut into blocks whose
accumulators stay in the cache; within a block the pairs are grouped by kernel offset. No pair is
padded or masked, so that every multiplication counts.

A tile has ``width`` vectors of 16 columns and as many rows as the registers allow. The kernels'
names end in the version of the generated tiles, which numba's cache does not see.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bevquant_sparse._conv_tile import (
    convolution_tile,
    cpu_features,
    outer_product_tile,
    row_prefetch,
)
from bevquant_sparse._jit import compiled
from bevquant_sparse._table import Table
from bevquant_sparse._threads import share

_AHEAD = 128  # entries behind the last pair that a prefetch may read


@dataclass(frozen=True)
class Plan:
    """Pairs by block of output rows, then by offset, ascending in the output row.

    Pairs ``bounds[b·volume + k] … bounds[b·volume + k + 1]`` belong to block ``b`` and offset
    ``k``.
    """

    block_rows: int
    num_blocks: int
    volume: int
    bounds: npt.NDArray[np.int64]
    in_rows: npt.NDArray[np.int32]
    out_rows: npt.NDArray[np.int32]


def plan_for(table: Table, block_rows: int, *, backwards: bool) -> Plan:
    """The plan of ``table``, or of its gradient's convolution; kept as long as the table."""

    def make() -> Plan:
        return _make(table.inverse if backwards else table.neighbours, block_rows)

    return table.derive(("plan", backwards, block_rows), make)


def _make(table: Tensor, block_rows: int) -> Plan:
    neighbours = table.contiguous().numpy()
    rows, volume = neighbours.shape
    num_blocks = -(-rows // block_rows)
    bounds = np.zeros(num_blocks * volume + 1, np.int64)
    share(lambda block: _count(block, block_rows, neighbours, bounds), num_blocks)
    np.cumsum(bounds, out=bounds)
    in_rows = np.zeros(bounds[-1] + _AHEAD, np.int32)
    out_rows = np.zeros(bounds[-1] + _AHEAD, np.int32)
    share(lambda block: _fill(block, block_rows, neighbours, bounds, in_rows, out_rows), num_blocks)
    return Plan(block_rows, num_blocks, volume, bounds, in_rows, out_rows)


@compiled("void(int64, int64, int32[:, ::1], int64[::1])")
def _count(block, block_rows, neighbours, bounds):
    volume = neighbours.shape[1]
    counts = np.zeros(volume, np.int64)
    for row in range(block * block_rows, min((block + 1) * block_rows, neighbours.shape[0])):
        for offset in range(volume):
            counts[offset] += neighbours[row, offset] >= 0
    for offset in range(volume):
        bounds[block * volume + offset + 1] = counts[offset]


@compiled("void(int64, int64, int32[:, ::1], int64[::1], int32[::1], int32[::1])")
def _fill(block, block_rows, neighbours, bounds, in_rows, out_rows):
    volume = neighbours.shape[1]
    seen = np.empty((2, block_rows + 1), np.int32)
    for offset in range(volume):
        # Always written, counted where present: no branch to mispredict.
        filled = 0
        for row in range(block * block_rows, min((block + 1) * block_rows, neighbours.shape[0])):
            neighbour = neighbours[row, offset]
            seen[0, filled] = neighbour
            seen[1, filled] = row
            filled += neighbour >= 0
        start = bounds[block * volume + offset]
        for i in range(filled):
            in_rows[start + i] = seen[0, i]
            out_rows[start + i] = seen[1, i]


# AVX-512 has 32 registers of 16 floats: 24 accumulators and their operands. Elsewhere a vector
# is two registers of 16 (AVX2) or four of 32 (NEON): 6 accumulators.
_WIDE = "avx512f" in cpu_features()
WIDEST = 4 if _WIDE else 1
CHANNELS = 4 if _WIDE else 6  # rows of an outer product's tile
_R1, _R2, _R3, _R4 = (8, 8, 8, 6) if _WIDE else (6, 3, 2, 1)
_AHEAD_1, _AHEAD_2, _AHEAD_3, _AHEAD_4 = 64, 64, 32, 12  # pairs between a prefetch and its tile

_tile_1, _tile_2 = convolution_tile(_R1, 1), convolution_tile(_R2, 2)
_tile_3, _tile_4 = convolution_tile(_R3, 3), convolution_tile(_R4, 4)
_ahead_1, _ahead_2, _ahead_3, _ahead_4 = map(row_prefetch, (_R1, _R2, _R3, _R4))
_outer_1, _outer_2 = outer_product_tile(CHANNELS, 1), outer_product_tile(CHANNELS, 2)
_outer_3, _outer_4 = outer_product_tile(CHANNELS, 3), outer_product_tile(CHANNELS, 4)


@compiled(
    "void(int64, int64, int64[::1], int32[::1], int32[::1], float32[:, ::1], float32[:, :, ::1],"
    " float32[::1], float32[:, ::1], int64, int64)"
)
def convolve_block_v1(block, block_rows, bounds, in_rows, out_rows, x, w, bias, out, column, width):
    """``out[rows of block, 16·width columns from column] = bias + Σ_k x[neighbour] @ w[k]``.

    Each output is one chain of fused multiply-adds over (offset, input channel), so it depends
    on nothing but its own neighbours.
    """
    volume, depth = w.shape[0], w.shape[1]
    for row in range(block * block_rows, min((block + 1) * block_rows, out.shape[0])):
        for i in range(column, column + 16 * width):
            out[row, i] = bias[i]
    x_at, x_stride = x.ctypes.data, x.shape[1] * 4
    out_at, out_stride = out.ctypes.data + column * 4, out.shape[1] * 4
    in_at, out_rows_at = in_rows.ctypes.data, out_rows.ctypes.data
    size = _R1 if width == 1 else _R2 if width == 2 else _R3 if width == 3 else _R4
    last = np.empty((2, size), np.int32)
    for offset in range(volume):
        start, stop = bounds[block * volume + offset], bounds[block * volume + offset + 1]
        w_at = w.ctypes.data + offset * depth * width * 64
        while start < stop:
            ins, outs = in_at + start * 4, out_rows_at + start * 4
            if start + size > stop:  # fill the tile with copies of the last pair
                for i in range(size):
                    last[0, i] = in_rows[min(start + i, stop - 1)]
                    last[1, i] = out_rows[min(start + i, stop - 1)]
                ins, outs = last.ctypes.data, last.ctypes.data + size * 4
            later = start * 4
            if width == 1:
                _ahead_1(x_at, x_stride, x_stride, in_at + later + 4 * _AHEAD_1)
                _ahead_1(out_at, out_stride, 64, out_rows_at + later + 4 * _AHEAD_1)
                _tile_1(x_at, x_stride, w_at, out_at, out_stride, ins, outs, depth)
            elif width == 2:
                _ahead_2(x_at, x_stride, x_stride, in_at + later + 4 * _AHEAD_2)
                _ahead_2(out_at, out_stride, 128, out_rows_at + later + 4 * _AHEAD_2)
                _tile_2(x_at, x_stride, w_at, out_at, out_stride, ins, outs, depth)
            elif width == 3:
                _ahead_3(x_at, x_stride, x_stride, in_at + later + 4 * _AHEAD_3)
                _ahead_3(out_at, out_stride, 192, out_rows_at + later + 4 * _AHEAD_3)
                _tile_3(x_at, x_stride, w_at, out_at, out_stride, ins, outs, depth)
            else:
                _ahead_4(x_at, x_stride, x_stride, in_at + later + 4 * _AHEAD_4)
                _ahead_4(out_at, out_stride, 256, out_rows_at + later + 4 * _AHEAD_4)
                _tile_4(x_at, x_stride, w_at, out_at, out_stride, ins, outs, depth)
            start += size


@compiled(
    "void(int64, int64, int64, int64, int64[::1], int32[::1], int32[::1], float32[:, ::1],"
    " float32[:, ::1], float32[:, :, ::1], int64, int64)"
)
def outer_products_v1(
    offset, first, stop, num_blocks, bounds, in_rows, out_rows, x, g, grad, column, width
):
    """``grad[offset, first:stop] += Σ_pairs x[in, first:stop]ᵀ · g[out, 16·width columns]``.

    Summed block by block, then over the blocks in order.
    """
    volume = grad.shape[0]
    x_at, x_stride = x.ctypes.data, x.shape[1] * 4
    g_at, g_stride = g.ctypes.data + column * 4, g.shape[1] * 4
    to, to_stride = grad.ctypes.data + column * 4, grad.shape[2] * 4
    for block in range(num_blocks):
        start = bounds[block * volume + offset]
        pairs = bounds[block * volume + offset + 1] - start
        if pairs == 0:
            continue
        ins, outs = in_rows.ctypes.data + start * 4, out_rows.ctypes.data + start * 4
        for channel in range(first, stop, CHANNELS):
            x_here = x_at + channel * 4
            here = to + (offset * grad.shape[1] + channel) * to_stride
            if width == 1:
                _outer_1(x_here, x_stride, g_at, g_stride, here, to_stride, ins, outs, pairs)
            elif width == 2:
                _outer_2(x_here, x_stride, g_at, g_stride, here, to_stride, ins, outs, pairs)
            elif width == 3:
                _outer_3(x_here, x_stride, g_at, g_stride, here, to_stride, ins, outs, pairs)
            else:
                _outer_4(x_here, x_stride, g_at, g_stride, here, to_stride, ins, outs, pairs)
