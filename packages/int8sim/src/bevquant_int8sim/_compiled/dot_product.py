"""The dot product of one step: a few channels of an input row against 16 output channels.

``vnni``: four unsigned bytes times four signed ones, added to int32 in one instruction
(``vpdpbusd``; LLVM never finds it by itself). Signed inputs get 128 added, which is one exclusive
or, and what that adds to a sum, 128 · Σw, is taken off again. ``portable``: two int16 times two
int16 (``pmaddwd`` and an addition), for every other CPU; int8 inputs are widened on the way, and
``portable16`` reads int16. Nothing saturates within a step: four products stay below 2¹⁸, two below
2³¹, and sums wrap modulo 2³², so that a sum that fits int32 is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from bevquant_int8sim._compiled.ir import (
    INT32,
    INTS,
    LANES,
    cpu_features,
    cpu_name,
    function,
    load_at,
    splat,
)

STEP_CHANNELS = {"amx": 4, "vnni": 4, "portable": 2, "portable16": 2}
FLIP = np.full(64, 0x80, np.uint8)  # adds 128 to every byte
_HALF = ir.VectorType(INT32, LANES // 2)


def is_wide() -> bool:
    """Whether a vector of 16 int32 is one of 32 registers, not two of 16."""
    return "avx512bw" in cpu_features()


def instruction_set(kind: str) -> str | None:
    """What `kind` compiles to on the CPU that numba compiles for; ``None`` where it cannot."""
    features = cpu_features()
    if kind == "amx":  # what it is no use for goes to VNNI
        return "AMX" if {"amx-tile", "amx-int8", "avx512vnni", "avx512bw"} <= features else None
    if kind == "vnni":
        if {"avx512vnni", "avx512bw"} <= features:
            return "AVX512-VNNI"
        return "AVX-VNNI" if {"avxvnni", "avx2"} <= features else None
    if "avx512bw" in features:
        return "AVX-512 BW"
    return "AVX2" if "avx2" in features else "generic vectors"


def flips_lines(kind: str) -> bool:
    """Whether whole lines of inputs are to get 128 added before `dot` takes them one by one."""
    # Intel's CPUs execute an exclusive or of 512 bits where they execute ``vpdpbusd``, and one for
    # every broadcast input takes an eighth of the products' time; AMD's have other places for it.
    return kind == "vnni" and is_wide() and not cpu_name().startswith("znver")


def input_bytes(kind: str) -> int:
    """Bytes of an input channel."""
    return 2 if kind == "portable16" else 1


def load_inputs(builder: ir.IRBuilder, kind: str, address: Any, step: Any, flip: Any) -> Any:
    """The channels of a step of the row at `address`, as `dot` takes them."""
    if kind == "portable":
        pair = splat(builder, load_at(builder, address, ir.IntType(16), step))
        narrow = builder.bitcast(pair, ir.VectorType(ir.IntType(8), 2 * LANES))
        wide = builder.sext(narrow, ir.VectorType(ir.IntType(16), 2 * LANES))
        return builder.bitcast(wide, INTS)
    inputs = splat(builder, load_at(builder, address, INT32, step))
    if kind == "vnni" and flip is not None:
        # None where the row is flipped already. `flip` is 16 lanes from memory, which LLVM does not
        # know. A known number it would flip before the broadcast, which takes the ports of the
        # products, and its optimizer does not end on a constant for CPUs such as Zen 5.
        return builder.xor(inputs, flip)
    return inputs


def dot(builder: ir.IRBuilder, kind: str, acc: Any, inputs: Any, weights: Any) -> Any:
    """``acc + Σ inputs · weights`` per lane; all three are vectors of 16 int32."""
    if kind == "vnni":
        if is_wide():
            call = function(builder, "llvm.x86.avx512.vpdpbusd.512", INTS, INTS, INTS, INTS)
            return builder.call(call, [acc, inputs, weights])
        call = function(builder, "llvm.x86.avx512.vpdpbusd.256", _HALF, _HALF, _HALF, _HALF)
        parts = [[_half(builder, v, i) for v in (acc, inputs, weights)] for i in (0, 1)]
        return _join(builder, *(builder.call(call, part) for part in parts))
    return builder.add(acc, _pair_products(builder, inputs, weights))


def _pair_products(builder: ir.IRBuilder, inputs: Any, weights: Any) -> Any:
    shorts = ir.VectorType(ir.IntType(16), 2 * LANES)
    a, b = builder.bitcast(inputs, shorts), builder.bitcast(weights, shorts)
    if is_wide():
        call = function(builder, "llvm.x86.avx512.pmaddw.d.512", INTS, shorts, shorts)
        return builder.call(call, [a, b])
    if "avx2" in cpu_features():
        narrow = ir.VectorType(ir.IntType(16), LANES)
        call = function(builder, "llvm.x86.avx2.pmadd.wd", _HALF, narrow, narrow)
        parts = [
            [builder.bitcast(_half(builder, v, i), narrow) for v in (inputs, weights)]
            for i in (0, 1)
        ]
        return _join(builder, *(builder.call(call, part) for part in parts))
    return _generic_pair_products(builder, a, b)


def _generic_pair_products(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    wide = ir.VectorType(INT32, 2 * LANES)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    even, odd = (_take(builder, products, range(i, 2 * LANES, 2)) for i in (0, 1))
    return builder.add(even, odd)


def _take(builder: ir.IRBuilder, vector: Any, places: range) -> Any:
    mask = ir.Constant(ir.VectorType(INT32, len(places)), list(places))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _half(builder: ir.IRBuilder, vector: Any, which: int) -> Any:
    return _take(builder, vector, range(which * LANES // 2, (which + 1) * LANES // 2))


def _join(builder: ir.IRBuilder, low: Any, high: Any) -> Any:
    mask = ir.Constant(INTS, list(range(LANES)))
    return builder.shuffle_vector(low, high, mask)
