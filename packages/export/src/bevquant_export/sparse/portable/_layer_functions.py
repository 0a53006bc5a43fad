"""What is computed on voxels, in standard operators; int8 is held as uint8 with zero point 128.

Scales are what ``bevquant_int8sim`` makes of a file's ranges, in float64 and in the same order of
operations: range / 127. Every rounding is half to even.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bevquant_export.sparse.portable._body import (
    BOOL,
    DOUBLE,
    FLOAT,
    HALF,
    INT8,
    INT32,
    INT64,
    UINT8,
    Body,
    Value,
)

if TYPE_CHECKING:
    from onnx import FunctionProto

_STEPS = 127
_ZERO = 128
_LARGEST = float(np.finfo(np.float32).max)


def quantized() -> FunctionProto:
    """``clamp(round(x / scale))``; NaN ends the run."""
    body = Body("Quantize", {"x": FLOAT}, ["range"])
    x = body.inputs["x"]
    bad = body.op("IsNaN", x, kind=BOOL).cast(INT32)
    zero = body.constant([0.0], FLOAT)
    checked = x + zero.rows(bad, label="features_are_numbers")
    return body.function(_stored(body, checked.cast(DOUBLE) / _scale(body, "range"), None))


def integer_convolution() -> FunctionProto:
    """int32 sums, the bias ``round(b / (s_x · s_w))`` in them, of uint8 weights around 128."""
    return _integer_convolution("IntegerConvolution", UINT8, _ZERO)


def signed_convolution() -> FunctionProto:
    """The same of int8 weights: faster, and exact where the CPU does not add in pairs."""
    return _integer_convolution("SignedConvolution", INT8, 0)


def _integer_convolution(name: str, kind: int, weight_zero: int) -> FunctionProto:
    body = Body(
        name,
        {"x": UINT8, "rows": INT32, "weight": kind, "bias": HALF, "weight_ranges": FLOAT},
        ["input_range"],
    )
    x, rows, weight, bias, _ = body.inputs.values()
    zeros = body.constant(_ZERO, UINT8), body.constant(weight_zero, kind)
    read = _gathered(body, x, rows, weight, _ZERO)
    sums = body.op("MatMulInteger", read, weight, *zeros, kind=INT32)
    steps = body.op("Round", bias.cast(DOUBLE) / _sum_scale(body)).cast(INT32)
    return body.function(sums + steps)


def float_convolution() -> FunctionProto:
    """float32, on float16 constants."""
    inputs = {"x": FLOAT, "rows": INT32, "weight": HALF, "bias": HALF}
    body = Body("FloatConvolution", inputs)
    x, rows, weight, bias = body.inputs.values()
    read = _gathered(body, x, rows, weight, 0)
    return body.function(body.op("MatMul", read, weight.cast(FLOAT)) + bias.cast(FLOAT))


def requantized() -> FunctionProto:
    """``clamp(round(sum · s_x·s_w / s_y))``, from `low` on."""
    body = Body(
        "Requantize",
        {"sums": INT32, "weight_ranges": FLOAT},
        ["input_range", "output_range", "low"],
    )
    factor = _sum_scale(body) / _scale(body, "output_range")
    made = body.inputs["sums"].cast(DOUBLE) * factor
    return body.function(_stored(body, made, body.number("low")))


def dequantized() -> FunctionProto:
    """``sum · s_x·s_w``."""
    body = Body("Dequantize", {"sums": INT32, "weight_ranges": FLOAT}, ["input_range"])
    return body.function((body.inputs["sums"].cast(DOUBLE) * _sum_scale(body)).cast(FLOAT))


def dequantized_int8() -> FunctionProto:
    """``q · scale``."""
    body = Body("DequantizeInt8", {"q": UINT8}, ["range"])
    return body.function((_signed(body.inputs["q"]) * _scale(body, "range")).cast(FLOAT))


def add_requantized(*, equal: bool = False) -> FunctionProto:
    """``clamp(round(a · s_a/s_y + b · s_b/s_y))``, from `low` on; of equal scales a + b is exact.

    Args:
        equal: Whether s_a = s_b.
    """
    body = Body(
        "AddEqual" if equal else "Add",
        {"a": UINT8, "b": UINT8},
        ["range_a", "output_range", "low"] if equal else
        ["range_a", "range_b", "output_range", "low"],
    )  # fmt: skip
    a, b = (value.cast(DOUBLE) for value in body.inputs.values())
    target = _scale(body, "output_range")
    factor = _scale(body, "range_a") / target
    if equal:
        made = (a + b - 2 * _ZERO) * factor
    else:
        made = (a - _ZERO) * factor + (b - _ZERO) * (_scale(body, "range_b") / target)
    return body.function(_stored(body, made, body.number("low")))


def add_floats() -> FunctionProto:
    """``a · s_a + b · s_b``, rounded once, to float32."""
    body = Body("AddDequantize", {"a": UINT8, "b": UINT8}, ["range_a", "range_b"])
    a, b = (_signed(value) for value in body.inputs.values())
    made = a * _scale(body, "range_a") + b * _scale(body, "range_b")
    return body.function(made.cast(FLOAT))


def signed() -> FunctionProto:
    """uint8 with zero point 128 as int8."""
    body = Body("Int8", {"q": UINT8})
    return body.function((body.inputs["q"].cast(INT32) - _ZERO).cast(INT8))


def max_pooled(*, integers: bool = False) -> FunctionProto:
    """The largest of the rows that each voxel reads; none is above what is absent.

    Args:
        integers: Whether they are uint8, whose order is that of what they stand for.
    """
    kind = UINT8 if integers else FLOAT
    body = Body("IntegerMaxPool" if integers else "MaxPool", {"x": kind, "rows": INT32})
    x, rows = body.inputs.values()
    lowest = body.filled(body.vector(1, x.size(1)), 0 if integers else -_LARGEST, kind)
    read = body.op("Concat", lowest, x, axis=0).rows(rows)  # [voxels, k0, k1, k2, channels]
    return body.function(body.op("ReduceMax", read, body.constant([1, 2, 3], INT64), keepdims=0))


def scatter_name(order: tuple[int, ...]) -> str:
    """Of the function `scattered`; that of the grid's own order has none in it."""
    return "ScatterDense" + "".join(map(str, order)) * (order != (0, 1, 2))


def scattered(order: tuple[int, ...]) -> FunctionProto:
    """Voxels to ``[batch, channels, n0, n1, n2]``, zero where there is none.

    Args:
        order: Of the grid's axes in the result. A Transpose behind it would be joined with the one
            in here to a permutation that onnxruntime takes nine times as long for.
    """
    inputs = {"x": FLOAT, "voxels": INT64, "batch_size": INT64}
    body = Body(scatter_name(order), inputs, ["spatial_shape"])
    x, voxels, batch_size = body.inputs.values()
    grid = body.integers("spatial_shape")
    place = voxels.column(0)
    for axis in order:
        place = place * grid.entry(axis) + voxels.column(axis + 1)
    cells = batch_size * grid.entry(0) * grid.entry(1) * grid.entry(2)
    empty = body.filled(body.vector(cells, x.size(1)), 0, FLOAT)
    rows = body.op("ScatterND", empty, place.spread(1), x)
    dense = rows.reshape(batch_size, *(grid.entry(axis) for axis in order), -1)
    return body.function(body.op("Transpose", dense, perm=[0, 4, 1, 2, 3]))


def _scale(body: Body, attribute: str) -> Value:
    return body.number(attribute) / _STEPS


def _sum_scale(body: Body) -> Value:
    """``s_w · s_x``, double ``[out_channels]``."""
    weight_scale = body.inputs["weight_ranges"].cast(DOUBLE) / _STEPS
    return weight_scale * _scale(body, "input_range")


def _signed(q: Value) -> Value:
    return q.cast(DOUBLE) - _ZERO


def _stored(body: Body, steps: Value, low: Value | None) -> Value:
    """Rounded, clamped, as uint8."""
    low = body.constant(-_ZERO, DOUBLE) if low is None else low
    clamped = body.op("Clip", body.op("Round", steps), low, body.constant(_STEPS, DOUBLE))
    return (clamped + _ZERO).cast(UINT8)


def _gathered(body: Body, x: Value, rows: Value, weight: Value, nothing: int) -> Value:
    """The rows that each voxel reads, side by side; row 0 stands for an absent neighbour."""
    absent = body.filled(body.vector(1, x.size(1)), nothing, x.kind)
    padded = body.op("Concat", absent, x, axis=0)
    return padded.rows(rows).reshape(-1, weight.size(0))
