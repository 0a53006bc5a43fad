"""Wait for a number in memory to change, awake: waking a sleeping thread costs 70 µs, this 1 µs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bevquant_int8sim._compiled.jit import compiled

__all__ = ["changed", "new_cell"]

_PAUSES = 2000  # 40 to 80 µs on today's CPUs
_LINE = 8  # numbers of a cache line, which no other data shares


def new_cell() -> npt.NDArray[np.int64]:
    """A number, 0 at first."""
    return np.zeros(_LINE, np.int64)


def _emit_peek(typingctx: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        if binding.get_default_triple().startswith("x86_64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            pause = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause")
            builder.call(pause, [])
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(types.int64), generate


_peek = intrinsic(_emit_peek)


@compiled("int64(int64, int64, int64)")
def _wait(address, seen, pauses):  # type: ignore[no-untyped-def]
    for _ in range(pauses):
        if _peek(address) != seen:
            return 1
    return 0


def changed(cell: npt.NDArray[np.int64], seen: int) -> bool:
    """Whether the cell's number is, or within tens of microseconds becomes, another than `seen`."""
    return bool(_wait(cell.ctypes.data, seen, _PAUSES))
