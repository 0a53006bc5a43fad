"""Positions of voxels and computations on them, in standard operators.

A grid is searched through pillars: its columns along one axis ``c``, in practice the shortest one;
``u`` and ``v`` are the other two. A first map holds, for each pillar with voxels, the start of its
cells in a second map. The second map has a cell for each possible voxel of such a pillar, with the
voxel's row, counted from 1. In both maps 0 means empty.

int8 is held as uint8 with zero point 128. Scales equal ``bevquant_int8sim``'s for a file's ranges,
in float64 and in the same order of operations: range / 127. Every rounding is half to even.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bevquant_export.voxels._body import (
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

_FAR = -(1 << 60)  # of three added to an index none becomes positive, and nothing overflows
_AXES = (0, 1, 2)
_STEPS = 127
_ZERO = 128
_LARGEST = float(np.finfo(np.float32).max)


def checked_voxels() -> FunctionProto:
    """Coordinates as int64; one outside of the grid or the batch ends the run.

    Standard operators refuse nothing on purpose, but the runtime checks the bounds of every
    gathering: rows are gathered from a tensor of one entry, by a number that is 1 where the voxel
    is wrong. The name of that node is what the runtime's message shows.
    """
    body = Body("CheckedVoxels", {"coords": INT32, "batch_size": INT64}, ["spatial_shape"])
    coords, batch_size = body.inputs.values()
    given = coords.cast(INT64)
    outside = (given < 0) | (given >= body.vector(batch_size, body.integers("spatial_shape")))
    wrong = body.op("ReduceMax", outside.cast(INT32), body.constant([1], INT64), keepdims=1)
    nothing = body.constant([0], INT64)
    return body.function(given + nothing.rows(wrong, label="voxels_lie_in_the_grid_and_the_batch"))


def distinct(name: str, rows: str, kind: int) -> FunctionProto:
    """The rows; a voxel that occurs twice, whose cell shows another row, ends the run."""
    body = Body(name, {rows: kind, "found": INT32})
    given, found = body.inputs.values()
    own = found.equals(body.count(1, found.size(0), INT32))
    wrong = body.op("Not", own).cast(INT32)
    nothing = body.constant([0], kind)
    return body.function(given + nothing.rows(wrong, label="voxels_occur_once").spread(1))


def pillar_map(column: int) -> FunctionProto:
    """Voxels to ``(pillars, cells, found)``, the maps along an axis and each voxel's own cell."""
    u, v = (axis for axis in _AXES if axis != column)
    body = Body(f"PillarMap{column}", {"voxels": INT64, "batch_size": INT64}, ["spatial_shape"])
    voxels, batch_size = body.inputs.values()
    grid = body.integers("spatial_shape")
    place = voxels.column(0) * grid.entry(u) + voxels.column(u + 1)
    pillar = place * grid.entry(v) + voxels.column(v + 1) + 1
    size = voxels.size(0)
    empty = body.filled(batch_size * grid.entry(u) * grid.entry(v) + 1, 0, INT32)
    used = body.op("ScatterElements", empty, pillar, body.filled(size, 1, INT32), axis=0)
    rank = body.op("CumSum", used, body.constant(0, INT64))
    width = grid.entry(column) + 1  # the first cell of a pillar stays empty
    pillars = used * rank * width.cast(INT32)
    most = body.op("ReduceMax", rank, keepdims=1).cast(INT64)
    cell = pillars.rows(pillar) + (voxels.column(column + 1) + 1).cast(INT32)
    none = body.filled((most + 1) * width, 0, INT32)
    rows = body.count(1, size, INT32)
    cells = body.op("ScatterElements", none, cell, rows, axis=0)
    return body.function(pillars, cells, cells.rows(cell))


def neighbours(column: int, *, inverse: bool = False) -> FunctionProto:
    """Rows under each kernel offset, int32 ``[voxels, k0, k1, k2]`` from 1 on; 0 is none.

    A voxel o of the result reads ``i = o·stride − padding + k·dilation``; of an inverse
    convolution the one with ``o = i·stride − padding + k·dilation``. Pillars are along `column`.
    """
    body = Body(
        f"{'Inverse' if inverse else ''}Neighbours{column}",
        {"voxels": INT64, "pillars": INT32, "cells": INT32},
        ["spatial_shape", "kernel_size", "stride", "padding", "dilation"],
    )
    voxels, pillars, cells = body.inputs.values()
    grid = body.integers("spatial_shape")
    u, v = (axis for axis in _AXES if axis != column)
    at: dict[int, tuple[Value, Value]] = {}
    for axis in _AXES:
        if inverse:
            at[axis] = _reached(body, voxels, axis, grid)
        else:
            start = voxels.column(axis + 1) * _entry(body, "stride", axis)
            start = (start - _entry(body, "padding", axis)).spread(1)
            read = start + _offsets(body, axis)
            at[axis] = read, (read >= 0) & (read < grid.entry(axis))
    far = body.constant(_FAR, INT64)
    row_u = (voxels.column(0) * grid.entry(u)).spread(1) + at[u][0]
    from_u = body.op("Where", at[u][1], row_u * grid.entry(v), far, kind=INT64)
    from_v = body.op("Where", at[v][1], at[v][0] + 1, far, kind=INT64)
    place = _placed(from_u, u) + _placed(from_v, v)
    # onnxruntime takes three times as long for Max.
    pillar = body.op("Clip", place, body.constant(0, INT64))
    none = body.constant(0, INT64)
    inside = body.op("Where", at[column][1], at[column][0] + 1, none, kind=INT64)
    cell = pillars.rows(pillar) + _placed(inside.cast(INT32), column)
    return body.function(cells.rows(cell))


def strided_voxels() -> FunctionProto:
    """Voxels of a strided convolution: all that a voxel reaches, in ascending order."""
    body = Body(
        "StridedVoxels",
        {"voxels": INT64, "batch_size": INT64},
        ["kernel_size", "stride", "padding", "dilation", "output_spatial_shape"],
    )
    voxels, batch_size = body.inputs.values()
    grid = body.integers("output_spatial_shape")
    steps = {2: None, 1: grid.entry(2), 0: grid.entry(1) * grid.entry(2)}
    far = body.constant(_FAR, INT64)
    frame = grid.entry(0) * grid.entry(1) * grid.entry(2)
    place = (voxels.column(0) * frame + 1).spread(1, 2, 3)
    for axis, step in steps.items():
        made, real = _reached(body, voxels, axis, grid)
        part = body.op("Where", real, made if step is None else made * step, far, kind=INT64)
        place = place + _placed(part, axis)
    cell = body.op("Clip", place, body.constant(0, INT64)).reshape(-1)
    empty = body.filled(batch_size * frame + 1, 0, UINT8)
    ones = body.filled(cell.size(0), 1, UINT8)
    reached = body.op("ScatterElements", empty, cell, ones, axis=0)
    first = body.constant([1], INT64)
    end = body.constant([(1 << 63) - 1], INT64)
    # Of one axis: over all four NonZero takes twice as long.
    flat = body.op("NonZero", body.op("Slice", reached, first, end), kind=INT64).reshape(-1)
    columns = []
    for axis in (2, 1, 0):
        columns.append(body.op("Mod", flat, grid.entry(axis)).spread(1))
        flat = flat / grid.entry(axis)
    return body.function(body.op("Concat", flat.spread(1), *reversed(columns), axis=1))


def _entry(body: Body, attribute: str, axis: int) -> Value:
    return body.integers(attribute).entry(axis)


def _offsets(body: Body, axis: int) -> Value:
    """``k·dilation``, ``[kernel]``."""
    return body.count(0, _entry(body, "kernel_size", axis), INT64) * _entry(body, "dilation", axis)


def _reached(body: Body, voxels: Value, axis: int, grid: Value) -> tuple[Value, Value]:
    """``o`` with ``o·stride = i + padding − k·dilation``, and whether there is one in the grid."""
    stride = _entry(body, "stride", axis)
    start = (voxels.column(axis + 1) + _entry(body, "padding", axis)).spread(1)
    numerator = start - _offsets(body, axis)
    made = numerator / stride
    whole = (made * stride).equals(numerator)
    return made, whole & (numerator >= 0) & (made < grid.entry(axis))


def _placed(values: Value, axis: int) -> Value:
    """``[rows, kernel]`` with its kernel at an axis of three."""
    return values.spread(*(other + 1 for other in _AXES if other != axis))


def quantized() -> FunctionProto:
    """``clamp(round(x / scale))``; NaN ends the run."""
    body = Body("Quantize", {"x": FLOAT}, ["range"])
    x = body.inputs["x"]
    bad = body.op("IsNaN", x, kind=BOOL).cast(INT32)
    zero = body.constant([0.0], FLOAT)
    checked = x + zero.rows(bad, label="features_are_numbers")
    return body.function(_stored(body, checked.cast(DOUBLE) / _scale(body, "range"), None))


def integer_convolution(name: str, kind: int, weight_zero: int) -> FunctionProto:
    """int32 sums, the bias ``round(b / (s_x · s_w))`` in them, of weights with a zero point.

    int8 weights around 0 are faster, and exact where the CPU does not add in pairs.
    """
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
    """``clamp(round(a · s_a/s_y + b · s_b/s_y))`` from `low` on; equal scales: a + b is exact."""
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
    """The largest of the rows that each voxel reads; absent rows hold the smallest value."""
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
    """Voxels to ``[batch, channels, n0, n1, n2]``, zero in empty cells, the axes in this order.

    Onnxruntime would merge a separate Transpose with the one in here to a permutation that takes
    nine times as long.
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
