"""The order in which the float32 CPU kernel walks a rulebook's pairs.

Output rows are cut into blocks whose accumulators stay in the cache; within a block the pairs are
grouped by kernel offset. No pair is padded or masked, so that every multiplication counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bevquant_sparse._jit import compiled
from bevquant_sparse._table import Table
from bevquant_sparse._threads import share

AHEAD = 128  # entries behind the last pair that a prefetch may read


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
    in_rows = np.zeros(bounds[-1] + AHEAD, np.int32)
    out_rows = np.zeros(bounds[-1] + AHEAD, np.int32)
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
