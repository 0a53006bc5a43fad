"""Register tiles in LLVM IR: the inner loops of the float32 convolution.

LLVM's vectoriser does not find these loops in scalar code (a fifth of the speed), so they are
written as vectors of 16 floats: one AVX-512 register, two of AVX2, four of NEON. A tile keeps
``rows × vectors`` accumulators in registers over its whole loop and adds products with a fused
multiply-add, one step of the loop after the other: the order of every sum is the loop's, whatever
the tile's shape and the instruction set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import config
from numba.core import cgutils, types
from numba.extending import intrinsic

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
    """Intrinsic ``(x, x_stride, row_bytes, in_rows)``: ask for ``rows`` rows of a later tile.

    The rows of a tile lie anywhere, which no hardware prefetcher foresees.
    """

    def emit(builder: ir.IRBuilder, args: Any) -> None:
        x, x_stride, row_bytes, in_rows = args
        byte = ir.IntType(8).as_pointer()
        prefetch = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32]),
            "llvm.prefetch",
        )
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
