"""Short names for the LLVM types and address arithmetic that the kernels are written in."""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba import config
from numba.core import cgutils

LANES = 16  # int32 accumulators of a vector: one register of AVX-512, two of AVX2, four of NEON
BYTE, INT32, INT64, DOUBLE = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.DoubleType()
INTS = ir.VectorType(INT32, LANES)
FLOATS, DOUBLES = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(DOUBLE, LANES)


def cpu_features() -> set[str]:
    """LLVM features of the CPU that numba compiles for, without their ``+``."""
    features = config.CPU_FEATURES
    if features is None:
        features = _host_features()
    return {name[1:] for name in features.split(",") if name.startswith("+")}


def cpu_name() -> str:
    """LLVM's name of the CPU that numba compiles for."""
    return config.CPU_NAME or _host_name()


@cache
def _host_name() -> str:
    return str(binding.get_host_cpu_name())


@cache
def _host_features() -> str:
    """What LLVM says of this CPU: a millisecond, and asked for with every weight."""
    return str(binding.get_host_cpu_features().flatten())


def pointer(builder: ir.IRBuilder, address: Any, kind: Any) -> Any:
    """`address` (int64) as a pointer to `kind`."""
    return builder.inttoptr(address, kind.as_pointer())


def load_at(builder: ir.IRBuilder, address: Any, kind: Any, index: Any = 0, align: int = 1) -> Any:
    """Element `index` of the array of `kind` at `address`."""
    place = index if isinstance(index, ir.Value) else INT64(index)
    return builder.load(builder.gep(pointer(builder, address, kind), [place]), align=align)


def add_bytes(builder: ir.IRBuilder, address: Any, count: Any, size: Any = 1) -> Any:
    """``address + count · size``."""
    amount = count if isinstance(count, ir.Value) else INT64(count)
    factor = size if isinstance(size, ir.Value) else INT64(size)
    return builder.add(address, builder.mul(amount, factor))


def row_address(builder: ir.IRBuilder, base: Any, stride: Any, rows: Any, index: Any) -> Any:
    """Address of the matrix row that entry `index` of the int32 list at `rows` names."""
    row = load_at(builder, rows, INT32, index, align=4)
    return add_bytes(builder, base, builder.sext(row, INT64), stride)


def splat(builder: ir.IRBuilder, scalar: Any, lanes: int = LANES) -> Any:
    """A vector of `lanes` copies of `scalar`."""
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    lane = builder.insert_element(undefined, scalar, INT32(0))
    zeros = ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
    return builder.shuffle_vector(lane, undefined, zeros)


def prefetch(builder: ir.IRBuilder, address: Any, write: bool) -> None:
    """Ask for the cache line at `address`, which need not be memory of ours."""
    kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), INT32, INT32, INT32])
    call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    settings = (write, 3, 1)  # read or write, keep near, data
    place = pointer(builder, address, BYTE)
    builder.call(call, [place, *(INT32(int(value)) for value in settings)])


def function(builder: ir.IRBuilder, name: str, result: Any, *arguments: Any) -> Any:
    """The LLVM intrinsic `name`, declared in the builder's module."""
    kind = ir.FunctionType(result, list(arguments))
    return cgutils.get_or_insert_function(builder.module, kind, name)
