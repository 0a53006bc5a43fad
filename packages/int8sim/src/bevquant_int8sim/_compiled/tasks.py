"""Tasks that threads take from a table in memory until none is left, without Python in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from bevquant_int8sim._compiled.ir import INT64, load_at, pointer
from bevquant_int8sim._compiled.jit import compiled
from bevquant_int8sim._compiled.threads import share

__all__ = ["Tasks", "Work", "cut", "run_tasks"]

_TASKS_A_THREAD = 16  # the last one is all that others may have to wait for
_SMALLEST = 2_000_000  # products of a task: 5 µs with VNNI
_KERNEL = ir.FunctionType(ir.VoidType(), [INT64, INT64, INT64])

Work = tuple[int, int, int, int]
"""Address of a kernel, number of its tiles, products in all, and where its parameters lie."""


def _emit_call(typingctx: Any, tasks: Any, number: Any, base: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        line = builder.add(args[0], builder.mul(args[1], INT64(32)))
        address, start, stop, place = (load_at(builder, line, INT64, i, 8) for i in range(4))
        kernel = builder.inttoptr(address, _KERNEL.as_pointer())
        builder.call(kernel, [start, stop, builder.add(place, args[2])])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _emit_take(typingctx: Any, counter: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        place = pointer(builder, args[0], INT64)
        return builder.atomic_rmw("add", place, INT64(1), "monotonic")

    return types.int64(types.int64), generate


_call, _take = intrinsic(_emit_call), intrinsic(_emit_take)


@compiled("void(int64, int64, int64, int64)")
def _drain(counter, tasks, count, base):  # type: ignore[no-untyped-def]
    number = _take(counter)
    while number < count:
        _call(tasks, number, base)
        number = _take(counter)


@dataclass(frozen=True, eq=False)
class Tasks:
    """Parts of some works, as `_drain` takes them.

    Attributes:
        rows: Kernel, first tile, last tile + 1, where the parameters lie.
        address: Of the rows.
        threads: How many threads the works were cut for.
    """

    rows: npt.NDArray[np.int64]
    address: int
    threads: int


def cut(works: Sequence[Work], threads: int) -> Tasks:
    """Cut works, which write disjoint places, into tasks for that many threads."""
    size = max(1, sum(products for _, _, products, _ in works))
    if threads > 1:
        size = max(_SMALLEST, size // (_TASKS_A_THREAD * threads))
    rows = []
    for kernel, tiles, products, place in works:
        parts = max(1, min(tiles, products // size))
        for part in range(parts):
            rows.append((kernel, tiles * part // parts, tiles * (part + 1) // parts, place))
    table = np.array(rows, np.int64)
    return Tasks(table, table.ctypes.data, threads)


def run_tasks(tasks: Tasks, counter: int, base: int = 0) -> None:
    """Run every task once.

    Args:
        tasks: The tasks.
        counter: Address of an int64 that is 0 and that nobody else uses.
        base: Added to where each task's parameters lie.
    """
    address, count = tasks.address, len(tasks.rows)
    if tasks.threads == 1:
        _drain(counter, address, count, base)
    else:
        share(lambda _: _drain(counter, address, count, base), tasks.threads)
