"""The loops of the kernels, in LLVM IR: a tile's accumulators stay in registers over all offsets.

A tile is ``rows`` output rows × 16·``vectors`` output channels. The sparse loop walks lists of
(kernel offset, input row of each tile row), in which an absent neighbour is row −1 and reads
zeros; the grid loop has every offset for every row, a fixed distance apart in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from bevquant_int8sim._compiled.dot_product import dot, flips_lines, load_inputs
from bevquant_int8sim._compiled.epilogue import emit_epilogue
from bevquant_int8sim._compiled.ir import (
    INT32,
    INT64,
    INTS,
    LANES,
    add_bytes,
    load_at,
    pointer,
    prefetch,
    row_address,
)
from bevquant_int8sim._compiled.parameters import P

_Registers = list[list[Any]]
_WRITTEN_OUT = (2, 4, 8)  # steps of 5 … 8, 16 and 32 input channels with VNNI


def sparse_loop(kind: str, rows: int, vectors: int) -> Any:
    """Intrinsic ``(first tile, last tile + 1, address of the parameters)`` over tiles of a plan."""

    def tile(builder: ir.IRBuilder, p: dict[P, Any], t: Any, sums: _Registers) -> None:
        first, stop = (
            builder.sext(load_at(builder, p[P.BOUNDS], INT32, i, 4), INT64)
            for i in (t, builder.add(t, INT64(1)))
        )
        for line in sums:
            for b, place in enumerate(line):
                builder.store(load_at(builder, p[P.INIT], INTS, b, 4), place)
        # VNNI adds 128 to inputs; the correction is a sum over the offsets that the tile has.
        adjusted = builder.icmp_signed("!=", p[P.OFFSET_INIT], INT64(0))
        with builder.if_then(adjusted):
            _add_offset_init(builder, p, sums, first, stop)
        with cgutils.for_range_slice(builder, first, stop, INT64(1), intp=INT64) as (entry, _):
            offset = builder.sext(load_at(builder, p[P.OFFSETS], INT32, entry, 4), INT64)
            names = add_bytes(builder, p[P.ROWS], entry, 4 * rows)
            sources = [present(builder, p, names, r) for r in range(rows)]
            _multiply(builder, kind, p, offset, sources, sums)

    return _loop(tile, rows, vectors)


def grid_loop(kind: str, rows: int, vectors: int) -> Any:
    """Intrinsic ``(first tile, last tile + 1, address of the parameters)`` over a dense grid."""

    def tile(builder: ir.IRBuilder, p: dict[P, Any], t: Any, sums: _Registers) -> None:
        for line in sums:
            for b, place in enumerate(line):
                builder.store(load_at(builder, p[P.INIT], INTS, b, 4), place)
        names = add_bytes(builder, p[P.ROWS], t, 4 * rows)
        origins = [
            row_address(builder, p[P.INPUT], p[P.INPUT_STRIDE], names, r) for r in range(rows)
        ]
        with cgutils.for_range(builder, p[P.VOLUME], intp=INT64) as loop:
            delta = load_at(builder, p[P.DELTAS], INT64, loop.index, 8)
            sources = [builder.add(origin, delta) for origin in origins]
            _multiply(builder, kind, p, loop.index, sources, sums)

    return _loop(tile, rows, vectors)


def _loop(
    tile: Callable[[ir.IRBuilder, dict[P, Any], Any, _Registers], None], rows: int, vectors: int
) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        first, stop, address = args
        p = {name: load_at(builder, address, INT64, int(name), 8) for name in P}
        # Stack variables, which LLVM's mem2reg turns into registers.
        sums = [[cgutils.alloca_once(builder, INTS) for _ in range(vectors)] for _ in range(rows)]
        block = cgutils.alloca_once(builder, ir.ArrayType(INTS, rows * vectors))
        memory = builder.ptrtoint(block, INT64)
        with cgutils.for_range_slice(builder, first, stop, INT64(1), intp=INT64) as (t, _):
            out_rows = add_bytes(builder, p[P.OUT_ROWS], t, 4 * rows)
            fetch_early(builder, p, out_rows, rows)
            tile(builder, p, t, sums)
            for i, place in enumerate(place for line in sums for place in line):
                at = builder.gep(pointer(builder, memory, INTS), [INT64(i)])
                builder.store(builder.load(place), at)
            emit_epilogue(builder, p, memory, out_rows, rows, vectors)
        return context.get_dummy_value()

    def loop(context, first, stop, parameters):
        return types.void(types.int64, types.int64, types.int64), codegen

    return intrinsic(loop)


def fetch_early(builder: ir.IRBuilder, p: dict[P, Any], out_rows: Any, rows: int) -> None:
    """Prefetch the epilogue's reads and writes during the products."""
    adds = builder.icmp_signed("!=", p[P.RESIDUAL], INT64(0))
    for r in range(rows):
        row = builder.sext(load_at(builder, out_rows, INT32, r, align=4), INT64)
        prefetch(builder, add_bytes(builder, p[P.OUT], row, p[P.OUT_STRIDE]), write=True)
        with builder.if_then(adds):
            other = add_bytes(builder, p[P.RESIDUAL], row, p[P.RESIDUAL_STRIDE])
            prefetch(builder, other, write=False)


def present(builder: ir.IRBuilder, p: dict[P, Any], names: Any, r: int) -> Any:
    """Address of the input row that entry `r` of the list at `names` names; of zeros for −1."""
    row = builder.sext(load_at(builder, names, INT32, r, align=4), INT64)
    there = add_bytes(builder, p[P.INPUT], row, p[P.INPUT_STRIDE])
    return builder.select(builder.icmp_signed(">=", row, INT64(0)), there, p[P.ABSENT])


def _add_offset_init(
    builder: ir.IRBuilder, p: dict[P, Any], sums: _Registers, first: Any, stop: Any
) -> None:
    """Add the offsets' own initial values: the same to every row, since all see every offset."""
    vectors = len(sums[0])
    with cgutils.for_range_slice(builder, first, stop, INT64(1), intp=INT64) as (entry, _):
        offset = builder.sext(load_at(builder, p[P.OFFSETS], INT32, entry, 4), INT64)
        here = add_bytes(builder, p[P.OFFSET_INIT], offset, vectors * LANES * 4)
        for b, place in enumerate(sums[0]):
            builder.store(
                builder.add(builder.load(place), load_at(builder, here, INTS, b, 4)), place
            )
    for line in sums[1:]:
        for source, place in zip(sums[0], line, strict=True):
            builder.store(builder.load(source), place)


def _multiply(
    builder: ir.IRBuilder,
    kind: str,
    p: dict[P, Any],
    offset: Any,
    sources: list[Any],
    sums: _Registers,
) -> None:
    """Add one offset's products: all steps of the input rows at `sources`.

    Few steps are written out: a loop would cost as much as they do. Whole lines of inputs may be
    flipped first, see `flips_lines`.
    """
    step_bytes = len(sums[0]) * LANES * 4
    size = builder.mul(p[P.STEPS], INT64(step_bytes))
    weights = add_bytes(builder, p[P.WEIGHT], offset, size)
    end = builder.append_basic_block("multiplied")
    for count in _WRITTEN_OUT:
        with builder.if_then(builder.icmp_signed("==", p[P.STEPS], INT64(count))):
            for step in range(count):
                _multiply_step(builder, kind, p, weights, INT64(step), sources, sums)
            builder.branch(end)
            # `if_then` branches to its own end; that branch needs a block, which nothing reaches.
            builder.position_at_end(builder.append_basic_block("unreachable"))
    done = INT64(0)
    if flips_lines(kind):
        lines = builder.udiv(p[P.STEPS], INT64(LANES))
        with cgutils.for_range(builder, lines, intp=INT64) as loop:
            _multiply_line(builder, kind, p, weights, loop.index, sources, sums)
        done = builder.mul(lines, INT64(LANES))
    with cgutils.for_range_slice(builder, done, p[P.STEPS], INT64(1), intp=INT64) as (step, _):
        _multiply_step(builder, kind, p, weights, step, sources, sums)
    builder.branch(end)
    builder.position_at_end(end)


def _multiply_line(
    builder: ir.IRBuilder,
    kind: str,
    p: dict[P, Any],
    weights: Any,
    line: Any,
    sources: list[Any],
    sums: _Registers,
) -> None:
    """The same for the sixteen steps of a line of each row, which are flipped at once."""
    size = LANES * 4
    block = cgutils.alloca_once(builder, ir.ArrayType(INTS, len(sources)))
    flipped = [
        add_bytes(builder, builder.ptrtoint(block, INT64), r, size) for r in range(len(sources))
    ]
    flip = load_at(builder, p[P.FLIP], INTS)
    for source, place in zip(sources, flipped, strict=True):
        inputs = builder.xor(load_at(builder, source, INTS, line), flip)
        builder.store(inputs, pointer(builder, place, INTS), align=1)
    first = builder.mul(line, INT64(size * len(sums[0]) * LANES))
    here = builder.add(weights, first)
    with cgutils.for_range(builder, INT64(LANES), intp=INT64) as loop:
        _multiply_step(builder, kind, p, here, loop.index, flipped, sums, are_flipped=True)


def _multiply_step(
    builder: ir.IRBuilder,
    kind: str,
    p: dict[P, Any],
    weights: Any,
    step: Any,
    sources: list[Any],
    sums: _Registers,
    *,
    are_flipped: bool = False,
) -> None:
    vectors = len(sums[0])
    line = add_bytes(builder, weights, step, vectors * LANES * 4)
    # Weights stay in registers for all rows of the tile; each input is broadcast once.
    columns = [load_at(builder, line, INTS, b, 4) for b in range(vectors)]
    for source, places in zip(sources, sums, strict=True):
        flip = None if are_flipped else load_at(builder, p[P.FLIP], INTS)
        wide = load_inputs(builder, kind, source, step, flip)
        for column, place in zip(columns, places, strict=True):
            builder.store(dot(builder, kind, builder.load(place), wide, column), place)
