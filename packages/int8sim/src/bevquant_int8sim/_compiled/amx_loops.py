"""The loops of the AMX kernels, in LLVM IR: blocks of 32 rows × 32 output channels in four tiles.

Layout. The input rows that a tile of 32 output rows reads are copied side by side into a block
``[entry, 32, channels]`` (tiles are read at one distance between rows, and voxels lie anywhere).
Weights lie as ``[offset, pair, step, channels of a step / 4, 32, 4]``: what `multiply` takes, for
two tiles of 16 output channels. A step has 16, 32 or 64 channels; a pair is 32 output channels.

Order. Copy once, then for every pair: the accumulators begin with the bias (read at a distance of
0, the same to every row), take all offsets and all steps, and go through memory of 4 KiB to the
epilogue that all kernels have. All eight tiles are in use: two of inputs and two of weights give
four products, so that each is read for two products, and one instruction has 16 · 16 · 64 of them.

Assumed: at most `BLOCK` bytes of input rows for a tile of the plan, which `packed` sees to; a
stack that has room for them. Nothing need be aligned. Products are int8 times int8, both signed, so
that inputs are taken as they are; a sum that fits int32 is exact.

Not run by those who wrote it on a CPU that has these instructions: checked bit for bit against
their definition, and for what LLVM makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bevquant_int8sim._compiled import tile_instructions as tiles
from bevquant_int8sim._compiled.epilogue import emit_epilogue
from bevquant_int8sim._compiled.ir import (
    BYTE,
    INT32,
    INT64,
    INTS,
    add_bytes,
    load_at,
    pointer,
    row_address,
)
from bevquant_int8sim._compiled.parameters import P
from bevquant_int8sim._compiled.tile_instructions import TILE_BYTES, TILE_ROWS
from bevquant_int8sim._compiled.tile_loops import fetch_early, present

ROWS = COLUMNS = 2 * TILE_ROWS
BLOCK = 512 * 1024  # bytes of copied input rows: 27 offsets of 512 channels, and 125 of 128
_SUMS_STRIDE = COLUMNS * 4
_QUARTER = ir.VectorType(BYTE, 16)

_Parameters = dict[P, Any]
_Source = Callable[[Any, Any], Any]  # (entry, row of the tile) → address of the input row
_Offset = Callable[[Any], Any]  # entry → kernel offset


def sparse_loop() -> Any:
    """Intrinsic ``(first tile, last tile + 1, address of the parameters)`` over tiles of a plan."""

    def tile(builder: ir.IRBuilder, p: _Parameters, t: Any) -> tuple[Any, _Source, _Offset]:
        first, stop = (
            builder.sext(load_at(builder, p[P.BOUNDS], INT32, i, 4), INT64)
            for i in (t, builder.add(t, INT64(1)))
        )

        def source(entry: Any, row: Any) -> Any:
            names = add_bytes(builder, p[P.ROWS], builder.add(first, entry), 4 * ROWS)
            return present(builder, p, names, row)

        def offset(entry: Any) -> Any:
            here = load_at(builder, p[P.OFFSETS], INT32, builder.add(first, entry), 4)
            return builder.sext(here, INT64)

        return builder.sub(stop, first), source, offset

    return _loop(tile)


def grid_loop() -> Any:
    """Intrinsic ``(first tile, last tile + 1, address of the parameters)`` over a dense grid."""

    def tile(builder: ir.IRBuilder, p: _Parameters, t: Any) -> tuple[Any, _Source, _Offset]:
        names = add_bytes(builder, p[P.ROWS], t, 4 * ROWS)

        def source(entry: Any, row: Any) -> Any:
            origin = row_address(builder, p[P.INPUT], p[P.INPUT_STRIDE], names, row)
            return builder.add(origin, load_at(builder, p[P.DELTAS], INT64, entry, 8))

        return p[P.VOLUME], source, lambda entry: entry

    return _loop(tile)


def _loop(
    tile: Callable[[ir.IRBuilder, _Parameters, Any], tuple[Any, _Source, _Offset]],
) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        first, stop, address = args
        p = {name: load_at(builder, address, INT64, int(name), 8) for name in P}
        block, sums = _memory(builder, BLOCK), _memory(builder, ROWS * _SUMS_STRIDE)
        tiles.configure(builder, p[P.TILES])
        with cgutils.for_range_slice(builder, first, stop, INT64(1), intp=INT64) as (t, _):
            out_rows = add_bytes(builder, p[P.OUT_ROWS], t, 4 * ROWS)
            fetch_early(builder, p, out_rows, ROWS)
            entries, source, offset = tile(builder, p, t)
            _copy(builder, p, block, entries, source)
            with cgutils.for_range(builder, p[P.PAIRS], intp=INT64) as pairs:
                _multiply(builder, p, pairs.index, block, entries, offset, sums)
                columns = _columns(builder, p, pairs.index)
                emit_epilogue(builder, columns, sums, out_rows, ROWS, 2)
        tiles.release(builder)
        return context.get_dummy_value()

    def loop(context, first, stop, parameters):
        return types.void(types.int64, types.int64, types.int64), codegen

    return intrinsic(loop)


def _memory(builder: ir.IRBuilder, size: int) -> Any:
    """Address of memory on the stack, at the start of a cache line.

    Not `alloca_once`, which fills it with zeros, one by one where it is that large.
    """
    with builder.goto_entry_block():
        made = builder.alloca(ir.ArrayType(BYTE, size))
    made.align = TILE_BYTES
    return builder.ptrtoint(made, INT64)


def _row_bytes(builder: ir.IRBuilder, p: _Parameters) -> Any:
    return builder.mul(p[P.STEPS], p[P.STEP_BYTES])


def _copy(builder: ir.IRBuilder, p: _Parameters, block: Any, entries: Any, source: _Source) -> None:
    """The input rows of a tile, side by side."""
    size = _row_bytes(builder, p)
    wide = builder.icmp_signed("==", p[P.STEP_BYTES], INT64(TILE_BYTES))
    with (
        cgutils.for_range(builder, entries, intp=INT64) as entry,
        cgutils.for_range(builder, INT64(ROWS), intp=INT64) as row,
    ):
        number = builder.add(builder.mul(entry.index, INT64(ROWS)), row.index)
        there, here = source(entry.index, row.index), add_bytes(builder, block, number, size)
        with builder.if_else(wide) as (by_lines, by_quarters):
            with by_lines:
                _copy_row(builder, there, here, size, INTS, TILE_BYTES)
            with by_quarters:
                _copy_row(builder, there, here, size, _QUARTER, TILE_BYTES // 4)


def _copy_row(
    builder: ir.IRBuilder, there: Any, here: Any, size: Any, kind: Any, width: int
) -> None:
    with cgutils.for_range(builder, builder.udiv(size, INT64(width)), intp=INT64) as part:
        value = load_at(builder, there, kind, part.index)
        place = builder.gep(pointer(builder, here, kind), [part.index])
        builder.store(value, place, align=1)


def _multiply(
    builder: ir.IRBuilder,
    p: _Parameters,
    pair: Any,
    block: Any,
    entries: Any,
    offset: _Offset,
    sums: Any,
) -> None:
    """The sums of a pair to the memory at `sums`: tiles 0 to 3, of inputs in 4, 5 and weights 6, 7.

    Tiles 0 and 1 are the first 16 rows, 0 and 2 the first 16 columns.
    """
    step_bytes, size = p[P.STEP_BYTES], _row_bytes(builder, p)
    half = builder.mul(size, INT64(TILE_ROWS))
    blocks_of_step = builder.mul(step_bytes, INT64(COLUMNS))
    first = add_bytes(builder, p[P.INIT], pair, COLUMNS * 4)
    for number in range(4):
        tiles.load(builder, number, add_bytes(builder, first, number % 2, TILE_BYTES), INT64(0))
    with cgutils.for_range(builder, entries, intp=INT64) as entry:
        place = builder.add(builder.mul(offset(entry.index), p[P.PAIRS]), pair)
        weights = add_bytes(builder, p[P.WEIGHT], builder.mul(place, p[P.STEPS]), blocks_of_step)
        rows = add_bytes(builder, block, builder.mul(entry.index, INT64(ROWS)), size)
        with cgutils.for_range(builder, p[P.STEPS], intp=INT64) as step:
            upper = add_bytes(builder, rows, step.index, step_bytes)
            left = add_bytes(builder, weights, step.index, blocks_of_step)
            tiles.load(builder, 4, upper, size)
            tiles.load(builder, 6, left, INT64(_SUMS_STRIDE))
            tiles.load(builder, 7, builder.add(left, INT64(TILE_BYTES)), INT64(_SUMS_STRIDE))
            tiles.multiply(builder, 0, 4, 6)
            tiles.multiply(builder, 1, 4, 7)
            tiles.load(builder, 5, builder.add(upper, half), size)
            tiles.multiply(builder, 2, 5, 6)
            tiles.multiply(builder, 3, 5, 7)
    for number in range(4):
        corner = number // 2 * TILE_ROWS * _SUMS_STRIDE + number % 2 * TILE_BYTES
        tiles.store(builder, number, builder.add(sums, INT64(corner)), INT64(_SUMS_STRIDE))


def _columns(builder: ir.IRBuilder, p: _Parameters, pair: Any) -> _Parameters:
    """The parameters of the epilogue of a pair; what is 0 stays 0."""
    requantized = builder.icmp_signed("!=", p[P.MULTIPLIER], INT64(0))
    adds = builder.icmp_signed("!=", p[P.RESIDUAL], INT64(0))
    none, first = INT64(0), builder.mul(pair, INT64(COLUMNS))
    out_bytes = builder.select(requantized, INT64(1), INT64(4))
    factors = builder.select(requantized, first, none)
    return p | {
        P.OUT: add_bytes(builder, p[P.OUT], first, out_bytes),
        P.MULTIPLIER: add_bytes(builder, p[P.MULTIPLIER], factors, 8),
        P.SINGLES: add_bytes(builder, p[P.SINGLES], factors, 4),
        P.RESIDUAL: builder.add(p[P.RESIDUAL], builder.select(adds, first, none)),
    }
