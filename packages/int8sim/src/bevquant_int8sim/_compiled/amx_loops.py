"""The loops of the AMX kernels, in LLVM IR: blocks of 32 rows × 32 output channels in four tiles.

Layout. A tile register is read at one distance between rows, and voxels lie anywhere: the input
rows that a tile of 32 output rows reads are copied into a block ``[entry, step, 32, channels of a
step]``, but for those of a grid that follow each other. Weights lie as ``[offset, pair, step,
channels of a step / 4, 32, 4]``: what `multiply` takes, for two tiles of 16 output channels. A step
has 32 or 64 channels; a pair is 32 output channels.

Order. For every pair: the accumulators begin with the bias (read at a distance of 0, the same to
every row), take all offsets and all steps, and go through memory of 4 KiB to the epilogue that all
kernels have. All eight tiles are in use: two of inputs and two of weights give four products, so
that each is read for two products, and one instruction has 16 · 16 · 64 of them.

Why it is fast. While the first pair multiplies one entry, the rows of the third one behind it are
copied: four products keep AMX busy for 64 cycles, and copying 32 rows takes about as many of the
loads and stores, if little else is to be done for a row. So the addresses of sixteen rows are
computed in vectors, and rows of one or two steps are written out. What is left is the second cache:
weights, and inputs from the second pair on, come from there.

Assumed: at most `BLOCK` bytes of input rows for a tile of the plan, which `packed` sees to; a
stack that has room for them. Rows of inputs need not be aligned. Products are int8 times int8, both
signed, so that inputs are taken as they are; a sum that fits int32 is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    LANES,
    add_bytes,
    load_at,
    pointer,
    splat,
)
from bevquant_int8sim._compiled.parameters import P
from bevquant_int8sim._compiled.tile_instructions import TILE_BYTES, TILE_ROWS
from bevquant_int8sim._compiled.tile_loops import fetch_early

ROWS = COLUMNS = 2 * TILE_ROWS
BLOCK = 512 * 1024  # bytes of copied input rows: 27 offsets of 512 channels, and 125 of 128
_SUMS_STRIDE = COLUMNS * 4
_AHEAD = 3  # entries that are copied before they are multiplied
_ADDRESSES = ir.VectorType(INT64, LANES)
_HALF_LINE, _LINE = (ir.VectorType(BYTE, size) for size in (TILE_BYTES // 2, TILE_BYTES))

_Parameters = dict[P, Any]


@dataclass(frozen=True)
class _Tile:
    """What a tile of output rows multiplies."""

    # Number of entries: of kernel offsets that some row sees.
    entries: Any
    offset: Callable[[Any], Any]
    # Entry, half → addresses of the input rows of the first or the last 16 rows.
    sources: Callable[[Any, int], Any]
    # Whether an entry's input rows follow each other in memory.
    side_by_side: Any


_MakeTile = Callable[[ir.IRBuilder, _Parameters, Any], _Tile]


def sparse_loop() -> Any:
    """Intrinsic ``(first tile, last tile + 1, address of the parameters)`` over tiles of a plan."""

    def make(builder: ir.IRBuilder, p: _Parameters, t: Any) -> _Tile:
        first, stop = (
            builder.sext(load_at(builder, p[P.BOUNDS], INT32, i, 4), INT64)
            for i in (t, builder.add(t, INT64(1)))
        )

        def offset(entry: Any) -> Any:
            here = load_at(builder, p[P.OFFSETS], INT32, builder.add(first, entry), 4)
            return builder.sext(here, INT64)

        def sources(entry: Any, half: int) -> Any:
            names = add_bytes(builder, p[P.ROWS], builder.add(first, entry), 4 * ROWS)
            rows = load_at(builder, names, INTS, half, 4)
            # No branch: an absent neighbour (-1) reads a row of zeros.
            present = builder.icmp_signed(">=", rows, ir.Constant(INTS, None))
            absent = splat(builder, p[P.ABSENT])
            return builder.select(present, _addresses(builder, p, rows), absent)

        return _Tile(builder.sub(stop, first), offset, sources, ir.IntType(1)(0))

    return _loop(make)


def grid_loop() -> Any:
    """Intrinsic ``(first tile, last tile + 1, address of the parameters)`` over a dense grid."""

    def make(builder: ir.IRBuilder, p: _Parameters, t: Any) -> _Tile:
        names = add_bytes(builder, p[P.ROWS], t, 4 * ROWS)

        def sources(entry: Any, half: int) -> Any:
            origins = _addresses(builder, p, load_at(builder, names, INTS, half, 4))
            delta = load_at(builder, p[P.DELTAS], INT64, entry, 8)
            return builder.add(origins, splat(builder, delta))

        # Row numbers ascend, so the ends tell whether all rows follow each other. Then a tile
        # register reads them where they lie, and nothing is copied.
        first, last = (load_at(builder, names, INT32, row, 4) for row in (0, ROWS - 1))
        follow = builder.icmp_signed("==", builder.sub(last, first), INT32(ROWS - 1))
        return _Tile(p[P.VOLUME], lambda entry: entry, sources, follow)

    return _loop(make)


def _addresses(builder: ir.IRBuilder, p: _Parameters, rows: Any) -> Any:
    """Of 16 input rows; factors that LLVM knows for int32 take one instruction and not three."""
    stride = splat(builder, builder.trunc(p[P.INPUT_STRIDE], INT32))
    far = builder.mul(builder.sext(rows, _ADDRESSES), builder.sext(stride, _ADDRESSES))
    return builder.add(splat(builder, p[P.INPUT]), far)


def _loop(make: _MakeTile) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        first, stop, address = args
        p = {name: load_at(builder, address, INT64, int(name), 8) for name in P}
        sums = _memory(builder, ROWS * _SUMS_STRIDE)
        copier = _Copier(builder, p)
        tiles.configure(builder, p[P.TILES])
        with cgutils.for_range_slice(builder, first, stop, INT64(1), intp=INT64) as (t, _):
            out_rows = add_bytes(builder, p[P.OUT_ROWS], t, 4 * ROWS)
            fetch_early(builder, p, out_rows, ROWS)
            tile = make(builder, p, t)
            copied = builder.select(tile.side_by_side, INT64(0), tile.entries)
            few = builder.icmp_signed("<", copied, INT64(_AHEAD))
            early = builder.select(few, copied, INT64(_AHEAD))
            with cgutils.for_range(builder, early, intp=INT64) as entry:
                copier.copy(tile, entry.index)
            # The first pair of output channels copies the other entries while it multiplies; later
            # pairs find all of them in the block.
            with cgutils.for_range(builder, p[P.PAIRS], intp=INT64) as pairs:
                begins = builder.icmp_signed("==", pairs.index, INT64(0))
                to_copy = builder.select(begins, copied, INT64(0))
                _multiply(builder, p, pairs.index, tile, copier, to_copy, sums)
                columns = _columns(builder, p, pairs.index)
                emit_epilogue(builder, columns, sums, out_rows, ROWS, 2)
        tiles.release(builder)
        return context.get_dummy_value()

    def loop(context, first, stop, parameters):
        return types.void(types.int64, types.int64, types.int64), codegen

    return intrinsic(loop)


def _memory(builder: ir.IRBuilder, size: int) -> Any:
    """Address of memory on the stack, at the start of a cache line."""
    with builder.goto_entry_block():
        # Not `alloca_once`, which fills it with zeros, one by one where it is that large.
        made = builder.alloca(ir.ArrayType(BYTE, size))
    made.align = TILE_BYTES
    return builder.ptrtoint(made, INT64)


class _Copier:
    """Copies the input rows of entries into the block, at whose start address `block` is."""

    def __init__(self, builder: ir.IRBuilder, p: _Parameters) -> None:
        self._builder, self._steps = builder, p[P.STEPS]
        self.row_bytes = builder.mul(p[P.STEPS], p[P.STEP_BYTES])
        self.block, self._places = _memory(builder, BLOCK), _memory(builder, 8 * ROWS)

    def entry(self, entry: Any) -> Any:
        """Where an entry's rows begin."""
        builder = self._builder
        return add_bytes(builder, self.block, builder.mul(entry, INT64(ROWS)), self.row_bytes)

    def copy(self, tile: _Tile, entry: Any) -> None:
        """Copy the rows of an entry, by one of four forms."""
        builder, here = self._builder, self.entry(entry)
        # Addresses go through memory: one load for each row, no lanes taken out of vectors.
        for half in range(2):
            sources = tile.sources(entry, half)
            to = builder.gep(pointer(builder, self._places, _ADDRESSES), [INT64(half)])
            builder.store(sources, to, align=TILE_BYTES)
        end = builder.append_basic_block("copied")
        for kind, steps in ((_HALF_LINE, 1), (_LINE, 1), (_LINE, 2)):
            fits = builder.icmp_signed("==", self.row_bytes, INT64(kind.count * steps))
            with builder.if_then(fits):  # written out: no counters, constant distances
                for row in range(ROWS):
                    for step in range(steps):
                        self._copy(here, INT64(row), INT64(step), kind)
                builder.branch(end)
                builder.position_at_end(builder.append_basic_block("unreachable"))
        with (
            cgutils.for_range(builder, INT64(ROWS), intp=INT64) as row,
            cgutils.for_range(builder, self._steps, intp=INT64) as step,
        ):
            self._copy(here, row.index, step.index, _LINE)
        builder.branch(end)
        builder.position_at_end(end)

    def _copy(self, here: Any, row: Any, step: Any, kind: Any) -> None:
        builder, size = self._builder, kind.count
        value = load_at(builder, load_at(builder, self._places, INT64, row, 8), kind, step)
        to = add_bytes(builder, add_bytes(builder, here, step, ROWS * size), row, size)
        builder.store(value, pointer(builder, to, kind), align=size)


def _multiply(
    builder: ir.IRBuilder,
    p: _Parameters,
    pair: Any,
    tile: _Tile,
    copier: _Copier,
    to_copy: Any,
    sums: Any,
) -> None:
    """The sums of a pair to the memory at `sums`: tiles 0 to 3, of inputs in 4, 5 and weights 6, 7.

    Tiles 0 and 1 are the first 16 rows, 0 and 2 the first 16 columns. Entries from `_AHEAD` to
    `to_copy` are copied on the way.
    """
    step_bytes, as_they_lie = p[P.STEP_BYTES], tile.side_by_side
    # Bytes of a step, of 32 rows or of 32 columns: ROWS equals COLUMNS.
    whole = builder.mul(step_bytes, INT64(COLUMNS))
    stride = builder.select(as_they_lie, p[P.INPUT_STRIDE], step_bytes)
    next_step = builder.select(as_they_lie, step_bytes, whole)
    half = builder.mul(stride, INT64(TILE_ROWS))
    first = add_bytes(builder, p[P.INIT], pair, COLUMNS * 4)
    for number in range(4):  # a distance of 0 reads the bias of 16 channels for all 16 rows
        tiles.load(builder, number, add_bytes(builder, first, number % 2, TILE_BYTES), INT64(0))
    with cgutils.for_range(builder, tile.entries, intp=INT64) as entry:
        place = builder.add(builder.mul(tile.offset(entry.index), p[P.PAIRS]), pair)
        weights = add_bytes(builder, p[P.WEIGHT], builder.mul(place, p[P.STEPS]), whole)
        source = builder.extract_element(tile.sources(entry.index, 0), INT32(0))
        rows = builder.select(as_they_lie, source, copier.entry(entry.index))
        with cgutils.for_range(builder, p[P.STEPS], intp=INT64) as step:
            upper = add_bytes(builder, rows, step.index, next_step)
            left = add_bytes(builder, weights, step.index, whole)
            # The second half of the rows is loaded while the first two products run.
            tiles.load(builder, 4, upper, stride)
            tiles.load(builder, 6, left, INT64(_SUMS_STRIDE))
            tiles.load(builder, 7, builder.add(left, INT64(TILE_BYTES)), INT64(_SUMS_STRIDE))
            tiles.multiply(builder, 0, 4, 6)
            tiles.multiply(builder, 1, 4, 7)
            tiles.load(builder, 5, builder.add(upper, half), stride)
            tiles.multiply(builder, 2, 5, 6)
            tiles.multiply(builder, 3, 5, 7)
        later = builder.add(entry.index, INT64(_AHEAD))
        with builder.if_then(builder.icmp_signed("<", later, to_copy)):
            copier.copy(tile, later)
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
