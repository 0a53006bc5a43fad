"""Fake quantization of long vectors at the speed of memory, as vectors in LLVM IR.

What is written is not read again soon, so it is stored past the caches: an ordinary store would
first read the line it overwrites, a third of all traffic. The mask of what lay inside the range is
one bit a value. LLVM's vectoriser finds neither by itself.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ._jit import jit

LANES = 16  # values a step, and bits of a mask word
_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR, _WORD = ir.VectorType(_FLOAT, LANES), ir.IntType(LANES)
_BITS = ir.VectorType(ir.IntType(1), LANES)


def _splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    lane = builder.insert_element(undefined, scalar, _INT32(0))
    return builder.shuffle_vector(
        lane, undefined, ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
    )


def _unary(builder: Any, name: str) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR])
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")


def _store_past_caches(builder: Any, value: Any, place: Any) -> None:
    store = builder.store(value, place, align=64)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT32, 1)]))


@intrinsic
def _quantize(typing, x, y, inside, words, amax, up, down, low, top):
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, y, inside, words, *scalars = args
        amax, up, down, low, top = (_splat(builder, scalar) for scalar in scalars)
        sources, targets = (builder.inttoptr(a, _VECTOR.as_pointer()) for a in (x, y))
        masks = builder.inttoptr(inside, _WORD.as_pointer())
        rint, fabs = _unary(builder, "rint"), _unary(builder, "fabs")
        with cgutils.for_range(builder, words, intp=_INT64) as loop:
            v = builder.load(builder.gep(sources, [loop.index]), align=4)
            q = builder.call(rint, [builder.fmul(v, up)])
            # Ordered comparisons are false for NaN, which so stays one.
            q = builder.select(builder.fcmp_ordered("<", q, low), low, q)
            q = builder.select(builder.fcmp_ordered(">", q, top), top, q)
            _store_past_caches(builder, builder.fdiv(q, down), builder.gep(targets, [loop.index]))
            within = builder.fcmp_ordered("<=", builder.call(fabs, [v]), amax)
            word = builder.bitcast(within, _WORD)
            builder.store(word, builder.gep(masks, [loop.index]), align=2)
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, *[types.float32] * 5), codegen


@intrinsic
def _keep(typing, grad, inside, out, words):
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        grad, inside, out, words = args
        sources, targets = (builder.inttoptr(a, _VECTOR.as_pointer()) for a in (grad, out))
        masks = builder.inttoptr(inside, _WORD.as_pointer())
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        with cgutils.for_range(builder, words, intp=_INT64) as loop:
            word = builder.load(builder.gep(masks, [loop.index]), align=2)
            value = builder.load(builder.gep(sources, [loop.index]), align=4)
            kept = builder.select(builder.bitcast(word, _BITS), value, zero)
            _store_past_caches(builder, kept, builder.gep(targets, [loop.index]))
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@jit
def quantize_stream(
    x: Any, y: Any, inside: Any, amax: Any, up: Any, down: Any, low: Any, top: Any
) -> None:
    """Quantize x into y, which is aligned to 64 bytes; one int16 of `inside` for 16 values."""
    _quantize(
        x.ctypes.data, y.ctypes.data, inside.ctypes.data, inside.size, amax, up, down, low, top
    )


@jit
def keep_stream(grad: Any, inside: Any, out: Any) -> None:
    """Copy the gradient where a bit of `inside` is set into `out`, aligned to 64 bytes."""
    _keep(grad.ctypes.data, inside.ctypes.data, out.ctypes.data, inside.size)
