"""From a tile's accumulators to memory: int32 as they are, or requantized to int8 on the way.

    q = clamp(rint(acc · multiplier))
    with a residual: clamp(rint((q + residual) · scale))
    or at once: clamp(rint(acc · multiplier + residual · scale))

in float64, half to even. The accumulators come through memory that stays in the first cache, so
that this code exists once a kernel and not once a register.
"""

from __future__ import annotations

from collections.abc import Callable
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
_Write = Callable[[Any, Any, Any, int], None]


def emit_epilogue(
    builder: ir.IRBuilder, p: dict[P, Any], sums: Any, out_rows: Any, rows: int, vectors: int
) -> None:
    """Store `rows` × `vectors` accumulators at address `sums` to the rows listed at `out_rows`.

    What differs between layers is decided once a tile: an epilogue takes as long as it has
    instructions.
    """

    def store(write: _Write) -> None:
        with cgutils.for_range(builder, INT64(rows), intp=INT64) as loop:
            row = builder.sext(load_at(builder, out_rows, INT32, loop.index, align=4), INT64)
            here = add_bytes(builder, sums, loop.index, vectors * LANES * 4)
            with builder.if_then(builder.icmp_signed(">=", row, INT64(0))):
                out = add_bytes(builder, p[P.OUT], row, p[P.OUT_STRIDE])
                other = add_bytes(builder, p[P.RESIDUAL], row, p[P.RESIDUAL_STRIDE])
                for b in range(vectors):
                    write(load_at(builder, here, INTS, b, 4), out, other, b)

    requantized = builder.icmp_signed("!=", p[P.MULTIPLIER], INT64(0))
    with builder.if_else(requantized) as (to_bytes, to_ints):
        with to_bytes:
            numbers = [load_at(builder, p[P.LIMITS], DOUBLE, i, 8) for i in range(6)]
            alone, twice, at_once = _writers(builder, p, numbers)
            adds = builder.icmp_signed("!=", p[P.RESIDUAL], INT64(0))
            with builder.if_else(adds) as (with_residual, without):
                with with_residual:
                    once = builder.fcmp_ordered("!=", numbers[5], DOUBLE(0.0))
                    with builder.if_else(once) as (first, second):
                        with first:
                            store(at_once)
                        with second:
                            store(twice)
                with without:
                    store(alone)
        with to_ints:
            store(lambda acc, out, other, b: _put(builder, acc, out, b, INTS))


def _writers(builder: ir.IRBuilder, p: dict[P, Any], numbers: list[Any]) -> list[_Write]:
    """What stores 16 accumulators as bytes: without a residual, with one, with one at once."""
    low, high, scale, sum_low, sum_high, own = (splat(builder, number) for number in numbers)

    def scaled(acc: Any, b: int) -> Any:
        return _product(builder, acc, load_at(builder, p[P.MULTIPLIER], DOUBLES, b, 8))

    def residual(other: Any, b: int) -> Any:
        return builder.sext(load_at(builder, other, _BYTES, b), INTS)

    def put(q: Any, out: Any, b: int) -> None:
        _put(builder, builder.trunc(q, _BYTES), out, b, _BYTES)

    def alone(acc: Any, out: Any, other: Any, b: int) -> None:
        put(_rounded(builder, scaled(acc, b), low, high), out, b)

    def twice(acc: Any, out: Any, other: Any, b: int) -> None:
        q = _rounded(builder, scaled(acc, b), low, high)
        total = builder.add(q, residual(other, b))
        put(_rounded(builder, _product(builder, total, scale), sum_low, sum_high), out, b)

    def at_once(acc: Any, out: Any, other: Any, b: int) -> None:
        total = builder.fadd(scaled(acc, b), _product(builder, residual(other, b), own))
        put(_rounded(builder, total, low, high), out, b)

    return [alone, twice, at_once]


def _put(builder: ir.IRBuilder, vector: Any, address: Any, b: int, kind: Any) -> None:
    place = builder.gep(pointer(builder, address, kind), [INT64(b)])
    builder.store(vector, place, align=1)


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
