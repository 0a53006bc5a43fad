"""Where voxels are, in standard operators: maps, neighbours, the voxels of a strided grid.

A grid is searched through pillars: its columns along one axis ``c``, in practice the shortest
one; ``u`` and ``v`` are the other two. One map says of each pillar in which a voxel lies where its
cells start in a second map, which has a cell for each voxel that could lie in such a pillar; a
cell holds the voxel's row, from 1 on. 0 means nothing in both, and leads to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bevquant_export.sparse.portable._body import FLOAT, INT32, INT64, UINT8, Body, Value

if TYPE_CHECKING:
    from onnx import FunctionProto

_FAR = -(1 << 60)  # of three added to an index none becomes positive, and nothing overflows
_AXES = (0, 1, 2)


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


def distinct_voxels() -> FunctionProto:
    """The features, unless a voxel occurs twice: then its cell shows another row than its own."""
    body = Body("DistinctVoxels", {"features": FLOAT, "found": INT32})
    features, found = body.inputs.values()
    return body.function(features + _nothing_unless_twice(body, found, FLOAT))


def distinct_coords() -> FunctionProto:
    """The voxels, unless one occurs twice."""
    body = Body("DistinctCoords", {"voxels": INT64, "found": INT32})
    voxels, found = body.inputs.values()
    return body.function(voxels + _nothing_unless_twice(body, found, INT64))


def _nothing_unless_twice(body: Body, found: Value, kind: int) -> Value:
    """A zero for each row; a row whose cell shows another one ends the run."""
    own = found.equals(body.count(1, found.size(0), INT32))
    wrong = body.op("Not", own).cast(INT32)
    nothing = body.constant([0], kind)
    return nothing.rows(wrong, label="voxels_occur_once").spread(1)


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
    convolution the one with ``o = i·stride − padding + k·dilation``.

    Args:
        column: Axis of the map's pillars.
        inverse: Whether it is an inverse convolution.
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
