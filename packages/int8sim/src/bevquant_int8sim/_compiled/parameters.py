"""The numbers a kernel is called with: one int64 each, addresses among them."""

from __future__ import annotations

from enum import IntEnum


class P(IntEnum):
    """Places in the parameter array.

    Strides are in bytes. What belongs to output channels starts at the first column of the group
    of channels that the call computes.
    """

    INPUT = 0
    INPUT_STRIDE = 1
    STEPS = 2  # steps of an input row, at least 1
    WEIGHT = 3  # [offset, step, vector, 16 lanes, channels of a step]
    INIT = 4  # int32: what the accumulators of each column begin with
    OFFSET_INIT = 5  # int32 [offset, columns] added once for each offset, or 0
    BOUNDS = 6  # sparse: int32, entries of tile t are bounds[t] … bounds[t + 1]
    OFFSETS = 7  # sparse: int32, kernel offset of each entry
    ROWS = 8  # sparse: int32 [entry, tile row]; grid: int32 [output], input row of offset 0
    DELTAS = 9  # grid: int64 [offset], bytes from the row of offset 0
    VOLUME = 10  # number of offsets
    OUT_ROWS = 11  # int32 [tile, tile row]: row of `out`, −1 for none
    OUT = 12
    OUT_STRIDE = 13
    MULTIPLIER = 14  # float64 [columns], or 0: the accumulators are stored as int32
    LIMITS = 15  # float64, see `Requantization.limits`
    RESIDUAL = 16  # int8 like `out`, added after requantization, or 0
    RESIDUAL_STRIDE = 17
    ABSENT = 18  # a row of zeros, which row −1 stands for
    FLIP = 19  # 64 bytes that inputs are xored with before they meet the weights
    SINGLES = 20  # float32 [columns]: MULTIPLIER
    TILES = 21  # AMX: the configuration of the tiles
    STEP_BYTES = 22  # AMX: bytes of a step of an input row
    PAIRS = 23  # AMX: blocks of 32 output channels; WEIGHT is [offset, pair, step, …]
