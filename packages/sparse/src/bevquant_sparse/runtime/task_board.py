"""What threads do without Python: wait for a number in memory to change, and take tasks together.

Waking a sleeping thread costs 70 µs and taking Python's lock as much when another thread has it, as
much as a layer; a number in memory costs 1 µs. The threads of a pool share a board of numbers. The
leader posts tasks, opens the board, takes part, closes it and waits until nobody is inside; a
member that sees a new turn steps inside, looks whether the board is open, takes tasks until none is
left, and steps out. So nobody reads what the leader writes for the next turn. Stages of tasks, each
of which needs what the one before made, are posted one after the other without Python in between.

Each thread has a lane of neighbouring tasks, and takes those of other lanes when its own is empty:
what one layer writes is then mostly in the cache of the thread that the next layer reads it in.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bevquant_sparse.runtime.jit import compiled

_PATIENCE = 200e-6  # seconds: as long as Python takes between two layers, and some more
_LINE = 8  # numbers of a cache line, which no other data shares
_INT64 = ir.IntType(64)
_KERNEL = ir.FunctionType(ir.VoidType(), [_INT64, _INT64, _INT64])

# Bytes from the start of the board.
TURN = 0
_OPEN, _INSIDE, _TASKS, _COUNT, _BASE, _LANES, _ASLEEP = 64, 128, 192, 200, 208, 216, 256
_COUNTERS = 320


def new_cell() -> npt.NDArray[np.int64]:
    """A number, 0 at first."""
    return np.zeros(_LINE, np.int64)


def new_board(threads: int) -> npt.NDArray[np.int64]:
    """The board of so many threads, the leader among them, closed; its first number is the turn."""
    board = np.zeros(_COUNTERS // 8 + threads * _LINE, np.int64)
    board[_LANES // 8] = threads
    return board


def set_asleep(board: npt.NDArray[np.int64], members: int) -> None:
    """Say how many threads no longer look at the board."""
    board[_ASLEEP // 8] = members


def _numbers(builder: ir.IRBuilder, address: Any) -> Any:
    """`address` as a pointer to int64."""
    return builder.inttoptr(address, _INT64.as_pointer())


def _emit_peek(typingctx: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        if binding.get_default_triple().startswith("x86_64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            pause = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause")
            builder.call(pause, [])
        return builder.load_atomic(_numbers(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


def _atomic(operation: str) -> Any:
    def emit(typingctx: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            return builder.atomic_rmw(operation, _numbers(builder, args[0]), args[1], "seq_cst")

        return types.int64(types.int64, types.int64), generate

    return intrinsic(emit)


def _emit_call(typingctx: Any, tasks: Any, number: Any, base: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        line = _numbers(builder, builder.add(args[0], builder.mul(args[1], _INT64(32))))
        address, start, stop, place = (
            builder.load(builder.gep(line, [_INT64(i)]), align=8) for i in range(4)
        )
        kernel = builder.inttoptr(address, _KERNEL.as_pointer())
        builder.call(kernel, [start, stop, builder.add(place, args[2])])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


_peek, _call = intrinsic(_emit_peek), intrinsic(_emit_call)
_add, _swap = _atomic("add"), _atomic("xchg")


@compiled("int64(int64, int64, int64)")
def _wait(address, seen, pauses):
    for _ in range(pauses):
        if _peek(address) != seen:
            return 1
    return 0


@functools.cache
def patience() -> int:
    """How many looks at a number fill `_PATIENCE`."""
    # Measured, once: the pause between two looks takes 10 to 140 cycles, by the CPU.
    cell, looks = new_cell(), 1000
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        _wait(cell.ctypes.data, 0, looks)
        seconds.append(time.perf_counter() - start)
    return max(looks, int(_PATIENCE / min(seconds) * looks))


def changed(cell: npt.NDArray[np.int64], seen: int) -> bool:
    """Whether the cell's number is, or within `_PATIENCE` becomes, another than `seen`."""
    return bool(_wait(cell.ctypes.data, seen, patience()))


@compiled("void(int64, int64, int64, int64)")
def drain(counter, tasks, count, base):
    """Take tasks by the shared counter and run them until none is left.

    Args:
        counter: Address of the number of the next task.
        tasks: Address of int64 rows: kernel, its first and second argument, and its third minus
            `base`.
        count: Number of the row to stop before.
        base: Added to each row's last number.
    """
    number = _add(counter, 1)
    while number < count:
        _call(tasks, number, base)
        number = _add(counter, 1)


@compiled("void(int64, int64, int64, int64, int64)")
def post(board, tasks, count, base, turn):
    """Open a board, closed and empty, with tasks as of `drain`."""
    _swap(board + _TASKS, tasks)
    _swap(board + _COUNT, count)
    _swap(board + _BASE, base)
    for lane in range(_peek(board + _LANES)):
        _swap(board + _COUNTERS + 64 * lane, count * lane // _peek(board + _LANES))
    _swap(board + _OPEN, 1)
    _swap(board + TURN, turn)


@compiled("void(int64, int64)")
def _drain_board(board, own):
    """Take the tasks of the thread's own lane, then those left in other lanes."""
    lanes, count = _peek(board + _LANES), _peek(board + _COUNT)
    for distance in range(lanes):
        lane = (own + distance) % lanes
        stop = count * (lane + 1) // lanes
        drain(board + _COUNTERS + 64 * lane, _peek(board + _TASKS), stop, _peek(board + _BASE))


@compiled("int64(int64, int64)")
def settled(board, pauses):
    """Close the board; returns whether all threads left it within this many pauses."""
    _swap(board + _OPEN, 0)
    for _ in range(pauses):
        if _peek(board + _INSIDE) == 0:
            return 1
    return 0


@compiled("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def lead(board, tasks, stops, stage, stages, base, turn, pauses):
    """Post the tasks of stage after stage on a board, and take part.

    Args:
        board: Address of the board, closed and empty.
        tasks: Address of the rows of all stages, as of `drain`.
        stops: Address of int64: for each stage, the number of the row to stop before.
        stage: The one to begin with.
        stages: How many there are.
        base: As of `drain`.
        turn: That stage 0 has; each has the next even number.
        pauses: How often to look, as in `settled`.

    Returns:
        The stage to go on with, `stages` if all are done; threads asleep are to be woken before.
        Negative, once one is inside for too long: then it has to leave before that stage begins.
    """
    while stage < stages:
        first = 0 if stage == 0 else _peek(stops + 8 * (stage - 1))
        here, count = tasks + 32 * first, _peek(stops + 8 * stage) - first
        if count == 1:
            _call(here, 0, base)
        else:
            if _peek(board + _ASLEEP) > 0:
                return stage
            post(board, here, count, base, turn + 2 * stage)
            _drain_board(board, 0)
            if not settled(board, pauses):
                return -stage - 1
        stage += 1
    return stages


@compiled("int64(int64, int64, int64, int64)")
def serve(board, lane, seen, pauses):
    """Take part in posted work, in a lane from 1 on, until this many looks found none.

    Returns the last turn that was seen, or at once another odd one.
    """
    waited = 0
    while waited < pauses:
        turn = _peek(board + TURN)
        if turn == seen:
            waited += 1
            continue
        # An odd turn stands for work that is not on the board.
        if turn % 2 == 1:
            return turn
        seen = turn
        _add(board + _INSIDE, 1)
        if _peek(board + _OPEN) == 1:
            _drain_board(board, lane)
        _add(board + _INSIDE, -1)
        waited = 0
    return seen
