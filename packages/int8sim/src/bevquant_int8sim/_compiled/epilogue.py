"""From a tile's accumulators to memory: int32 as they are, or requantized to int8 on the way.

    q = clamp(rint(acc · multiplier))
    with a residual: clamp(rint((q + residual) · scale))
    or at once: clamp(rint(acc · multiplier + residual · scale))

in float64, half to even. The accumulators come through memory that stays in the first cache, so
that this code exists once a kernel and not once a register.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from bevquant_int8sim._compiled.dot_product import is_wide
from bevquant_int8sim._compiled.ir import (
    BYTE,
    DOUBLE,
    DOUBLES,
    INT32,
    INT64,
    INTS,
    LANES,
    add_bytes,
    function,
    load_at,
    pointer,
    splat,
)
from bevquant_int8sim._compiled.parameters import P

__all__ = ["emit_epilogue"]

_BYTES = ir.VectorType(BYTE, LANES)


def emit_epilogue(
    builder: ir.IRBuilder, p: dict[P, Any], sums: Any, out_rows: Any, rows: int, vectors: int
) -> None:
    """Store `rows` × `vectors` accumulators at address `sums` to the rows listed at `out_rows`."""
    with cgutils.for_range(builder, INT64(rows), intp=INT64) as loop:
        row = builder.sext(load_at(builder, out_rows, INT32, loop.index, align=4), INT64)
        here = add_bytes(builder, sums, loop.index, vectors * LANES * 4)
        with builder.if_then(builder.icmp_signed(">=", row, INT64(0))):
            out = add_bytes(builder, p[P.OUT], row, p[P.OUT_STRIDE])
            requantized = builder.icmp_signed("!=", p[P.MULTIPLIER], INT64(0))
            with builder.if_else(requantized) as (to_bytes, to_ints):
                with to_bytes:
                    residual = add_bytes(builder, p[P.RESIDUAL], row, p[P.RESIDUAL_STRIDE])
                    for b in range(vectors):
                        _store_bytes(builder, p, here, out, residual, b)
                with to_ints:
                    for b in range(vectors):
                        place = builder.gep(pointer(builder, out, INTS), [INT64(b)])
                        builder.store(load_at(builder, here, INTS, b, 4), place, align=4)


def _store_bytes(
    builder: ir.IRBuilder, p: dict[P, Any], here: Any, out: Any, residual: Any, b: int
) -> None:
    numbers = [load_at(builder, p[P.LIMITS], DOUBLE, i, 8) for i in range(6)]
    limits = [splat(builder, number) for number in numbers]
    multiplier = load_at(builder, p[P.MULTIPLIER], DOUBLES, b, 8)
    value = _product(builder, load_at(builder, here, INTS, b, 4), multiplier)
    start = builder.block
    present = builder.icmp_signed("!=", p[P.RESIDUAL], INT64(0))
    at_once = builder.fcmp_ordered("!=", numbers[5], DOUBLE(0.0))
    with builder.if_then(builder.and_(present, at_once)):
        other = builder.sext(load_at(builder, residual, _BYTES, b), INTS)
        joined = builder.fadd(value, _product(builder, other, limits[5]))
        joining = builder.block
    either = builder.phi(DOUBLES)
    either.add_incoming(value, start)
    either.add_incoming(joined, joining)
    q = _rounded(builder, either, limits[0], limits[1])
    single = builder.block
    with builder.if_then(builder.and_(present, builder.not_(at_once))):
        other = load_at(builder, residual, _BYTES, b)
        total = builder.add(q, builder.sext(other, INTS))
        added = _rounded(builder, _product(builder, total, limits[2]), limits[3], limits[4])
        summed = builder.block
    result = builder.phi(INTS)
    result.add_incoming(q, single)
    result.add_incoming(added, summed)
    narrow = builder.trunc(result, _BYTES)
    builder.store(narrow, builder.gep(pointer(builder, out, _BYTES), [INT64(b)]), align=1)


def _product(builder: ir.IRBuilder, ints: Any, factor: Any) -> Any:
    return builder.fmul(builder.sitofp(ints, DOUBLES), factor)


def _rounded(builder: ir.IRBuilder, value: Any, low: Any, high: Any) -> Any:
    value = builder.select(builder.fcmp_ordered("<", value, low), low, value)
    value = builder.select(builder.fcmp_ordered(">", value, high), high, value)
    if is_wide():  # one instruction rounds to the nearest integer, half to even, and converts
        nearest = function(builder, f"llvm.lrint.v{LANES}i32.v{LANES}f64", INTS, DOUBLES)
        return builder.call(nearest, [value])
    rint = function(builder, f"llvm.rint.v{LANES}f64", DOUBLES, DOUBLES)
    return builder.fptosi(builder.call(rint, [value]), INTS)
