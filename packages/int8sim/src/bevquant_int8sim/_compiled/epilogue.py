"""From a tile's accumulators to memory: int32 as they are, or requantized to int8 on the way.

    q = clamp(rint(acc · multiplier))
    with a residual: clamp(rint((q + residual) · scale))
    or at once: clamp(rint(acc · multiplier + residual · scale))

in float64, half to even. float32 gives the same integer unless a value lies near a tie: a row is
computed in float32, and again in float64 where one of its values does. The accumulators come
through memory that stays in the first cache, so that this code exists once a kernel and not once a
register.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from bevquant_int8sim._compiled.ir import (
    BYTE,
    DOUBLE,
    DOUBLES,
    FLOATS,
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

_BYTES = ir.VectorType(BYTE, LANES)
_LANES_MASK = ir.IntType(LANES)


def emit_epilogue(
    builder: ir.IRBuilder, p: dict[P, Any], sums: Any, out_rows: Any, rows: int, vectors: int
) -> None:
    """Store `rows` × `vectors` accumulators at address `sums` to the rows listed at `out_rows`."""

    def each_row(store: Callable[[Any, Any, Any], None]) -> None:
        with cgutils.for_range(builder, INT64(rows), intp=INT64) as loop:
            row = builder.sext(load_at(builder, out_rows, INT32, loop.index, align=4), INT64)
            here = add_bytes(builder, sums, loop.index, vectors * LANES * 4)
            # Rows that fill the last tile have the number -1.
            with builder.if_then(builder.icmp_signed(">=", row, INT64(0))):
                out = add_bytes(builder, p[P.OUT], row, p[P.OUT_STRIDE])
                other = add_bytes(builder, p[P.RESIDUAL], row, p[P.RESIDUAL_STRIDE])
                store(here, out, other)

    def bytes_of(quick: _Singles, exact: _Doubles, sort: str) -> None:
        make, remake = getattr(quick, sort), getattr(exact, sort)

        def store(here: Any, out: Any, other: Any) -> None:
            quick.begin_row()
            for b in range(vectors):
                _put(builder, make(here, other, INT64(b)), out, INT64(b), _BYTES)
            with builder.if_then(quick.is_near_a_tie()):
                with cgutils.for_range(builder, INT64(vectors), intp=INT64) as loop:
                    _put(builder, remake(here, other, loop.index), out, loop.index, _BYTES)

        each_row(store)

    def ints(here: Any, out: Any, other: Any) -> None:
        for b in range(vectors):
            _put(builder, load_at(builder, here, INTS, b, 4), out, INT64(b), INTS)

    # What differs between layers is decided once a tile: for few input channels, an epilogue has as
    # many instructions as the products.
    requantized = builder.icmp_signed("!=", p[P.MULTIPLIER], INT64(0))
    with builder.if_else(requantized) as (to_bytes, to_ints):
        with to_bytes:
            numbers = [load_at(builder, p[P.LIMITS], DOUBLE, i, 8) for i in range(7)]
            forms = _Singles(builder, p, numbers), _Doubles(builder, p, numbers)
            adds = builder.icmp_signed("!=", p[P.RESIDUAL], INT64(0))
            with builder.if_else(adds) as (with_residual, without):
                with with_residual:
                    once = builder.fcmp_ordered("!=", numbers[5], DOUBLE(0.0))
                    with builder.if_else(once) as (first, second):
                        with first:
                            bytes_of(*forms, "at_once")
                        with second:
                            bytes_of(*forms, "twice")
                with without:
                    bytes_of(*forms, "alone")
        with to_ints:
            each_row(ints)


class _Form:
    """The arithmetic in one float type: 16 accumulators to 16 bytes."""

    floats: Any
    multiplier: P

    def __init__(self, builder: ir.IRBuilder, p: dict[P, Any], numbers: list[Any]) -> None:
        self.builder, self._factors = builder, p[self.multiplier]
        element = self.floats.element
        narrow = [n if element == DOUBLE else builder.fptrunc(n, element) for n in numbers]
        splats = [splat(builder, number) for number in narrow]
        self.low, self.high, self.scale, self.sum_low, self.sum_high, self.own, self.edge = splats

    def alone(self, here: Any, other: Any, b: Any) -> Any:
        """Without a residual."""
        return self._bytes(self._rounded(self._scaled(here, b), self.low, self.high))

    def twice(self, here: Any, other: Any, b: Any) -> Any:
        """With a residual behind the requantization."""
        q = self._rounded(self._scaled(here, b), self.low, self.high)
        total = self.builder.fadd(q, self._residual(other, b))
        scaled = self.builder.fmul(total, self.scale)
        return self._bytes(self._rounded(scaled, self.sum_low, self.sum_high))

    def at_once(self, here: Any, other: Any, b: Any) -> Any:
        """With a residual before anything is rounded."""
        own = self.builder.fmul(self._residual(other, b), self.own)
        total = self.builder.fadd(self._scaled(here, b), own)
        return self._bytes(self._rounded(total, self.low, self.high))

    def _scaled(self, here: Any, b: Any) -> Any:
        floats = self.builder.sitofp(load_at(self.builder, here, INTS, b, 4), self.floats)
        return self.builder.fmul(floats, load_at(self.builder, self._factors, self.floats, b, 4))

    def _residual(self, other: Any, b: Any) -> Any:
        narrow = load_at(self.builder, other, _BYTES, b)
        return self.builder.sitofp(self.builder.sext(narrow, INTS), self.floats)

    def _rounded(self, value: Any, low: Any, high: Any) -> Any:
        """Clamped, then to the nearest integer, half to even; still a float."""
        builder = self.builder
        # Clamped first: the limits are integers, and `fptosi` of a large value is undefined.
        value = builder.select(builder.fcmp_ordered("<", value, low), low, value)
        value = builder.select(builder.fcmp_ordered(">", value, high), high, value)
        nearest = self._call("rint", value)
        self._see(value, nearest)
        return nearest

    def _see(self, value: Any, nearest: Any) -> None:
        """Look at a value that was rounded."""

    def _bytes(self, value: Any) -> Any:
        return self.builder.trunc(self.builder.fptosi(value, INTS), _BYTES)

    def _call(self, name: str, *values: Any) -> Any:
        kinds = [self.floats] * len(values)
        element = "f64" if self.floats.element == DOUBLE else "f32"
        intrinsic = f"llvm.{name}.v{LANES}{element}"
        return self.builder.call(function(self.builder, intrinsic, self.floats, *kinds), values)


class _Doubles(_Form):
    """What the result is."""

    floats, multiplier = DOUBLES, P.MULTIPLIER


class _Singles(_Form):
    """The same in half the instructions, but near a tie."""

    floats, multiplier = FLOATS, P.SINGLES

    def begin_row(self) -> None:
        """No value was rounded yet."""
        self._farthest = None

    def is_near_a_tie(self) -> Any:
        """Whether float64 may round a value of the row to another integer."""
        lanes = self.builder.fcmp_ordered(">", self._farthest, self.edge)
        mask = self.builder.bitcast(lanes, _LANES_MASK)
        return self.builder.icmp_signed("!=", mask, _LANES_MASK(0))

    def _see(self, value: Any, nearest: Any) -> None:
        distance = self._call("fabs", self.builder.fsub(value, nearest))
        if self._farthest is not None:
            more = self.builder.fcmp_ordered(">", distance, self._farthest)
            distance = self.builder.select(more, distance, self._farthest)
        self._farthest = distance


def _put(builder: ir.IRBuilder, vector: Any, address: Any, b: Any, kind: Any) -> None:
    builder.store(vector, builder.gep(pointer(builder, address, kind), [b]), align=1)
