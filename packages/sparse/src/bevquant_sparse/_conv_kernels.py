"""The float32 CPU kernels: blocks of a plan through register tiles.

A plan is the order in which a rulebook's pairs are walked: output rows are cut into blocks whose
accumulators stay in the cache; within a block the pairs are grouped by kernel offset. No pair is
padded or masked, so that every multiplication counts.

A tile has ``width`` vectors of 16 columns and as many rows as the registers allow. LLVM's
vectoriser does not find these loops in scalar code (a fifth of the speed), so they are written in
LLVM IR, as vectors of 16 floats: one AVX-512 register, two of AVX2, four of NEON. A tile keeps
``rows × vectors`` accumulators in registers over its whole loop and adds products with a fused
multiply-add, one step of the loop after the other: the order of every sum is the loop's, whatever
the tile's shape and the instruction set. Kernels and tiles are one file, whose changes numba's
on-disk cache sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import config
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from bevquant_sparse._table import Table
from bevquant_sparse.runtime.jit import compiled
from bevquant_sparse.runtime.threads import share

LANES = 16  # floats per vector
_FLOAT = ir.FloatType()
_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_Grid = list[list[Any]]


def cpu_features() -> set[str]:
    """LLVM features of the CPU that numba compiles for, without their ``+``."""
    features = config.CPU_FEATURES
    if features is None:
        features = binding.get_host_cpu_features().flatten()
    return {name[1:] for name in features.split(",") if name.startswith("+")}


def _fused() -> bool:
    """Whether the CPU has a fused multiply-add; without one LLVM would call a slow routine."""
    x86 = binding.get_process_triple().startswith(("x86", "i386", "i686"))
    return not x86 or "fma" in cpu_features()


def convolution_tile(rows: int, vectors: int) -> Any:
    """Intrinsic ``(x, x_stride, w, out, out_stride, in_rows, out_rows, depth)``, all addresses.

    ``out[out_rows[r], :] += Σ_i x[in_rows[r], i] · w[i, :]`` for ``rows`` pairs and
    ``16·vectors`` columns. Strides are in bytes, ``w`` is dense, row lists are int32. Pairs may
    repeat the last one: every copy computes and stores the same.
    """

    def emit(builder: ir.IRBuilder, args: Any) -> None:
        x, x_stride, w, out, out_stride, in_rows, out_rows, depth = args
        sources = [
            _pointer(builder, _row(builder, x, x_stride, in_rows, r), _FLOAT) for r in range(rows)
        ]
        targets = [_row(builder, out, out_stride, out_rows, r) for r in range(rows)]
        places = [[_vector(builder, target, b) for b in range(vectors)] for target in targets]
        start = [[builder.load(place, align=4) for place in line] for line in places]
        weights = _pointer(builder, w, _VECTOR)

        def step(i: Any) -> tuple[list[Any], list[Any]]:
            first = builder.mul(i, _INT64(vectors))
            lines = [
                builder.load(builder.gep(weights, [builder.add(first, _INT64(b))]), align=4)
                for b in range(vectors)
            ]
            return [builder.load(builder.gep(source, [i])) for source in sources], lines

        sums = _accumulate(builder, depth, start, step)
        for line, values in zip(places, sums, strict=True):
            for place, value in zip(line, values, strict=True):
                builder.store(value, place, align=4)

    codegen = _codegen(emit)

    def tile(context, x, x_stride, w, out, out_stride, in_rows, out_rows, depth):
        return types.void(*[types.int64] * 8), codegen

    return intrinsic(tile)


def outer_product_tile(rows: int, vectors: int) -> Any:
    """Intrinsic ``(x, x_stride, g, g_stride, out, out_stride, in_rows, out_rows, pairs)``.

    ``out[r, :] += Σ_p x[in_rows[p], r] · g[out_rows[p], :]`` for ``rows`` rows and
    ``16·vectors`` columns, the sum over the pairs taken from zero before it is added.
    """

    def emit(builder: ir.IRBuilder, args: Any) -> None:
        x, x_stride, g, g_stride, out, out_stride, in_rows, out_rows, pairs = args
        zero = ir.Constant(_VECTOR, [0.0] * LANES)

        def step(p: Any) -> tuple[list[Any], list[Any]]:
            source = _pointer(builder, _row(builder, x, x_stride, in_rows, p), _FLOAT)
            line = _row(builder, g, g_stride, out_rows, p)
            scalars = [builder.load(builder.gep(source, [_INT64(r)])) for r in range(rows)]
            return scalars, [
                builder.load(_vector(builder, line, b), align=4) for b in range(vectors)
            ]

        sums = _accumulate(builder, pairs, [[zero] * vectors for _ in range(rows)], step)
        for r, values in enumerate(sums):
            target = builder.add(out, builder.mul(out_stride, _INT64(r)))
            for b, value in enumerate(values):
                place = _vector(builder, target, b)
                builder.store(builder.fadd(builder.load(place, align=4), value), place, align=4)

    codegen = _codegen(emit)

    def tile(context, x, x_stride, g, g_stride, out, out_stride, in_rows, out_rows, pairs):
        return types.void(*[types.int64] * 9), codegen

    return intrinsic(tile)


def row_prefetch(rows: int) -> Any:
    """Intrinsic ``(x, x_stride, row_bytes, in_rows)``: ask for ``rows`` rows of a later tile."""

    def emit(builder: ir.IRBuilder, args: Any) -> None:
        x, x_stride, row_bytes, in_rows = args
        byte = ir.IntType(8).as_pointer()
        prefetch = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32]),
            "llvm.prefetch",
        )
        # The rows of a tile lie anywhere, which no hardware prefetcher foresees.
        starts = [_row(builder, x, x_stride, in_rows, r) for r in range(rows)]
        with cgutils.for_range_slice(builder, _INT64(0), row_bytes, _INT64(64)) as (line, _):
            for start in starts:
                place = builder.inttoptr(builder.add(start, line), byte)
                builder.call(prefetch, [place, _INT32(0), _INT32(3), _INT32(1)])

    codegen = _codegen(emit)

    def ahead(context, x, x_stride, row_bytes, in_rows):
        return types.void(*[types.int64] * 4), codegen

    return intrinsic(ahead)


def _accumulate(
    builder: ir.IRBuilder,
    count: Any,
    start: _Grid,
    step: Callable[[Any], tuple[list[Any], list[Any]]],
) -> _Grid:
    """``start[r][b] + Σ_i scalars(i)[r] · vectors(i)[b]`` for ``count ≥ 1`` steps, in order."""
    before = builder.block
    loop = builder.append_basic_block("tile.loop")
    after = builder.append_basic_block("tile.end")
    builder.branch(loop)
    builder.position_at_end(loop)
    i = builder.phi(_INT64)
    i.add_incoming(_INT64(0), before)
    phis = [[builder.phi(_VECTOR) for _ in line] for line in start]
    scalars, vectors = step(i)
    multiply_add = _multiply_add(builder)
    sums = []
    for scalar, line in zip(scalars, phis, strict=True):
        wide = _broadcast(builder, scalar)
        sums.append([multiply_add(wide, v, s) for v, s in zip(vectors, line, strict=True)])
    for line, first, following in zip(phis, start, sums, strict=True):
        for phi, value, summed in zip(line, first, following, strict=True):
            phi.add_incoming(value, before)
            phi.add_incoming(summed, loop)
    advanced = builder.add(i, _INT64(1))
    i.add_incoming(advanced, loop)
    builder.cbranch(builder.icmp_signed("<", advanced, count), loop, after)
    builder.position_at_end(after)
    return sums


def _multiply_add(builder: ir.IRBuilder) -> Callable[[Any, Any, Any], Any]:
    if not _fused():
        return lambda a, b, c: builder.fadd(builder.fmul(a, b), c)
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return lambda a, b, c: builder.call(fma, [a, b, c])


def _broadcast(builder: ir.IRBuilder, scalar: Any) -> Any:
    lane = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, _INT32(0))
    mask = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
    return builder.shuffle_vector(lane, ir.Constant(_VECTOR, ir.Undefined), mask)


def _row(builder: ir.IRBuilder, base: Any, stride: Any, rows: Any, position: Any) -> Any:
    """Address of row ``rows[position]`` of the matrix at ``base``."""
    index = position if isinstance(position, ir.Value) else _INT64(position)
    row = builder.load(builder.gep(_pointer(builder, rows, _INT32), [index]))
    return builder.add(base, builder.mul(builder.sext(row, _INT64), stride))


def _vector(builder: ir.IRBuilder, base: Any, position: int) -> Any:
    return builder.gep(_pointer(builder, base, _VECTOR), [_INT64(position)])


def _pointer(builder: ir.IRBuilder, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _codegen(emit: Callable[[ir.IRBuilder, Any], None]) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        emit(builder, args)
        return context.get_dummy_value()

    return codegen


_AHEAD = 128  # entries behind the last pair that a prefetch may read


@dataclass(frozen=True)
class Plan:
    """Pairs by block of output rows, then by offset, ascending in the output row.

    Pairs ``bounds[b·volume + k] … bounds[b·volume + k + 1]`` belong to block ``b`` and offset
    ``k``.
    """

    block_rows: int
    num_blocks: int
    volume: int
    bounds: npt.NDArray[np.int64]
    in_rows: npt.NDArray[np.int32]
    out_rows: npt.NDArray[np.int32]


def plan_for(table: Table, block_rows: int, *, backwards: bool) -> Plan:
    """The plan of ``table``, or of its gradient's convolution; kept as long as the table."""

    def make() -> Plan:
        return _make(table.inverse if backwards else table.neighbours, block_rows)

    return table.derive(("plan", backwards, block_rows), make)


def _make(table: Tensor, block_rows: int) -> Plan:
    neighbours = table.contiguous().numpy()
    rows, volume = neighbours.shape
    num_blocks = -(-rows // block_rows)
    bounds = np.zeros(num_blocks * volume + 1, np.int64)
    share(lambda block: _count(block, block_rows, neighbours, bounds), num_blocks)
    np.cumsum(bounds, out=bounds)
    in_rows = np.zeros(bounds[-1] + _AHEAD, np.int32)
    out_rows = np.zeros(bounds[-1] + _AHEAD, np.int32)
    share(lambda block: _fill(block, block_rows, neighbours, bounds, in_rows, out_rows), num_blocks)
    return Plan(block_rows, num_blocks, volume, bounds, in_rows, out_rows)


@compiled("void(int64, int64, int32[:, ::1], int64[::1])")
def _count(block, block_rows, neighbours, bounds):
    volume = neighbours.shape[1]
    counts = np.zeros(volume, np.int64)
    for row in range(block * block_rows, min((block + 1) * block_rows, neighbours.shape[0])):
        for offset in range(volume):
            counts[offset] += neighbours[row, offset] >= 0
    for offset in range(volume):
        bounds[block * volume + offset + 1] = counts[offset]


@compiled("void(int64, int64, int32[:, ::1], int64[::1], int32[::1], int32[::1])")
def _fill(block, block_rows, neighbours, bounds, in_rows, out_rows):
    volume = neighbours.shape[1]
    seen = np.empty((2, block_rows + 1), np.int32)
    for offset in range(volume):
        # Always written, counted where present: no branch to mispredict.
        filled = 0
        for row in range(block * block_rows, min((block + 1) * block_rows, neighbours.shape[0])):
            neighbour = neighbours[row, offset]
            seen[0, filled] = neighbour
            seen[1, filled] = row
            filled += neighbour >= 0
        start = bounds[block * volume + offset]
        for i in range(filled):
            in_rows[start + i] = seen[0, i]
            out_rows[start + i] = seen[1, i]


# AVX-512 has 32 registers of 16 floats: 24 accumulators and their operands. Elsewhere a vector
# is two registers of 16 (AVX2) or four of 32 (NEON): 6 accumulators.
_WIDE = "avx512f" in cpu_features()
WIDEST = 4 if _WIDE else 1
CHANNELS = 4 if _WIDE else 6  # rows of an outer product's tile
_R1, _R2, _R3, _R4 = (8, 8, 8, 6) if _WIDE else (6, 3, 2, 1)
_AHEAD_1, _AHEAD_2, _AHEAD_3, _AHEAD_4 = 64, 64, 32, 12  # pairs between a prefetch and its tile

_tile_1, _tile_2 = convolution_tile(_R1, 1), convolution_tile(_R2, 2)
_tile_3, _tile_4 = convolution_tile(_R3, 3), convolution_tile(_R4, 4)
_ahead_1, _ahead_2, _ahead_3, _ahead_4 = map(row_prefetch, (_R1, _R2, _R3, _R4))
_outer_1, _outer_2 = outer_product_tile(CHANNELS, 1), outer_product_tile(CHANNELS, 2)
_outer_3, _outer_4 = outer_product_tile(CHANNELS, 3), outer_product_tile(CHANNELS, 4)


@compiled(
    "void(int64, int64, int64[::1], int32[::1], int32[::1], float32[:, ::1], float32[:, :, ::1],"
    " float32[::1], float32[:, ::1], int64, int64)"
)
def convolve_block(block, block_rows, bounds, in_rows, out_rows, x, w, bias, out, column, width):
    """``out[rows of block, 16·width columns from column] = bias + Σ_k x[neighbour] @ w[k]``."""
    volume, depth = w.shape[0], w.shape[1]
    for row in range(block * block_rows, min((block + 1) * block_rows, out.shape[0])):
        for i in range(column, column + 16 * width):
            out[row, i] = bias[i]
    x_at, x_stride = x.ctypes.data, x.shape[1] * 4
    out_at, out_stride = out.ctypes.data + column * 4, out.shape[1] * 4
    in_at, out_rows_at = in_rows.ctypes.data, out_rows.ctypes.data
    size = _R1 if width == 1 else _R2 if width == 2 else _R3 if width == 3 else _R4
    last = np.empty((2, size), np.int32)
    # Each output is one chain of fused multiply-adds over (offset, input channel), so it depends on
    # nothing but its own neighbours.
    for offset in range(volume):
        start, stop = bounds[block * volume + offset], bounds[block * volume + offset + 1]
        w_at = w.ctypes.data + offset * depth * width * 64
        while start < stop:
            ins, outs = in_at + start * 4, out_rows_at + start * 4
            if start + size > stop:  # fill the tile with copies of the last pair
                for i in range(size):
                    last[0, i] = in_rows[min(start + i, stop - 1)]
                    last[1, i] = out_rows[min(start + i, stop - 1)]
                ins, outs = last.ctypes.data, last.ctypes.data + size * 4
            later = start * 4
            if width == 1:
                _ahead_1(x_at, x_stride, x_stride, in_at + later + 4 * _AHEAD_1)
                _ahead_1(out_at, out_stride, 64, out_rows_at + later + 4 * _AHEAD_1)
                _tile_1(x_at, x_stride, w_at, out_at, out_stride, ins, outs, depth)
            elif width == 2:
                _ahead_2(x_at, x_stride, x_stride, in_at + later + 4 * _AHEAD_2)
                _ahead_2(out_at, out_stride, 128, out_rows_at + later + 4 * _AHEAD_2)
                _tile_2(x_at, x_stride, w_at, out_at, out_stride, ins, outs, depth)
            elif width == 3:
                _ahead_3(x_at, x_stride, x_stride, in_at + later + 4 * _AHEAD_3)
                _ahead_3(out_at, out_stride, 192, out_rows_at + later + 4 * _AHEAD_3)
                _tile_3(x_at, x_stride, w_at, out_at, out_stride, ins, outs, depth)
            else:
                _ahead_4(x_at, x_stride, x_stride, in_at + later + 4 * _AHEAD_4)
                _ahead_4(out_at, out_stride, 256, out_rows_at + later + 4 * _AHEAD_4)
                _tile_4(x_at, x_stride, w_at, out_at, out_stride, ins, outs, depth)
            start += size


@compiled(
    "void(int64, int64, int64, int64, int64[::1], int32[::1], int32[::1], float32[:, ::1],"
    " float32[:, ::1], float32[:, :, ::1], int64, int64)"
)
def outer_products(
    offset, first, stop, num_blocks, bounds, in_rows, out_rows, x, g, grad, column, width
):
    """``grad[offset, first:stop] += Σ_pairs x[in, first:stop]ᵀ · g[out, 16·width columns]``."""
    volume = grad.shape[0]
    x_at, x_stride = x.ctypes.data, x.shape[1] * 4
    g_at, g_stride = g.ctypes.data + column * 4, g.shape[1] * 4
    to, to_stride = grad.ctypes.data + column * 4, grad.shape[2] * 4
    # Summed block by block, then over the blocks in order.
    for block in range(num_blocks):
        start = bounds[block * volume + offset]
        pairs = bounds[block * volume + offset + 1] - start
        if pairs == 0:
            continue
        ins, outs = in_rows.ctypes.data + start * 4, out_rows.ctypes.data + start * 4
        for channel in range(first, stop, CHANNELS):
            x_here = x_at + channel * 4
            here = to + (offset * grad.shape[1] + channel) * to_stride
            if width == 1:
                _outer_1(x_here, x_stride, g_at, g_stride, here, to_stride, ins, outs, pairs)
            elif width == 2:
                _outer_2(x_here, x_stride, g_at, g_stride, here, to_stride, ins, outs, pairs)
            elif width == 3:
                _outer_3(x_here, x_stride, g_at, g_stride, here, to_stride, ins, outs, pairs)
            else:
                _outer_4(x_here, x_stride, g_at, g_stride, here, to_stride, ins, outs, pairs)
