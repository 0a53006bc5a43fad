"""Every kernel against int64, on operands at which wrong arithmetic shows: all of it saturating.

Instructions that add products in 16 bits (``vpmaddubsw``, and with it ``torch._int_mm`` on CPUs
without VNNI) give other sums here.

Linux gives a process the 8 KiB of AMX's tile registers when it asks (``arch_prctl``,
``ARCH_REQ_XCOMP_PERM``, component 18; Documentation/arch/x86/xstate.rst); without leave, as under
some sandboxes, the first tile instruction ends the process, and so would a CPU or a compiler that
does less than it says. The test of these kernels is therefore run in a forked child first. A fork
takes one thread along, and with it what others hold locked, for ever: the thread that forks takes
numba's lock before, which it then has in the child too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import platform
import signal
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from numba.core.compiler_lock import global_compiler_lock

from bevquant_int8sim._compiled.grid import grid_calls, make_plan
from bevquant_int8sim._compiled.launch import run_calls
from bevquant_int8sim._compiled.packed import pack_weight
from bevquant_int8sim._compiled.sparse import readable_rows, sparse_calls
from bevquant_int8sim._matmul import saturating_operands
from bevquant_sparse.tiles import SparsePlan

_ROWS, _VOLUME = 20, 5  # more offsets than AMX copies ahead
_SHAPES = tuple((24, outputs) for outputs in (16, 32, 48, 64))  # one of each width of tile
_AMX_SHAPES = (32, 64), (64, 32), (128, 64), (192, 32)  # each way to copy rows, one pair and two


def kernels_are_exact(kind: str) -> bool:
    """Whether every kernel of `kind` equals int64."""
    shapes = _AMX_SHAPES if kind == "amx" else _SHAPES
    return all(_sparse_is_exact(kind, *s) and _grid_is_exact(kind, *s) for s in shapes)


def _operands(channels: int, outputs: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    x, w = saturating_operands(_ROWS, _VOLUME * channels, outputs)
    return x.reshape(_ROWS * _VOLUME, channels), w.reshape(_VOLUME, channels, outputs)


def _expected(
    x: npt.NDArray[np.int8], w: npt.NDArray[np.int8], rows: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """Sums over (offset, channel), the offsets' input rows being ``rows[:, offset]``."""
    chosen = x.astype(np.int64)[rows].reshape(len(rows), -1)
    return chosen @ w.astype(np.int64).reshape(-1, w.shape[2])


def _sparse_is_exact(kind: str, channels: int, outputs: int) -> bool:
    x, w = _operands(channels, outputs)
    packed = pack_weight(w, kind)
    tiles = -(-_ROWS // packed.rows)
    pairs = np.arange(_ROWS * _VOLUME, dtype=np.int32).reshape(_ROWS, _VOLUME)
    lines = np.full((tiles * packed.rows, _VOLUME), -1, np.int32)
    lines[:_ROWS] = pairs
    by_entry = np.ascontiguousarray(
        lines.reshape(tiles, packed.rows, _VOLUME).transpose(0, 2, 1).reshape(-1, packed.rows)
    )
    out_rows = np.full(tiles * packed.rows, -1, np.int32)
    out_rows[:_ROWS] = np.arange(_ROWS)
    plan = SparsePlan(
        packed.rows,
        tiles,
        np.arange(tiles + 1, dtype=np.int32) * _VOLUME,
        np.tile(np.arange(_VOLUME, dtype=np.int32), tiles),
        by_entry,
        out_rows,
    )
    out = np.empty((_ROWS, outputs), np.int32)
    run_calls(sparse_calls(readable_rows(x, packed), packed, None, plan, out))
    return bool((out == _expected(x, w, pairs)).all())


def _grid_is_exact(kind: str, channels: int, outputs: int) -> bool:
    x, w = _operands(channels, outputs)
    packed = pack_weight(w, kind)
    pairs = np.arange(_ROWS * _VOLUME, dtype=np.int32).reshape(_ROWS, _VOLUME)
    plan = make_plan(pairs[:, 0], np.arange(_ROWS), np.arange(_VOLUME), packed.rows)
    out = np.empty((_ROWS, outputs), np.int32)
    run_calls(grid_calls(readable_rows(x, packed), packed, None, plan, out))
    return bool((out == _expected(x, w, pairs)).all())


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_PATIENCE = 60.0  # seconds; the kernels compile in one or two


def amx_refusal() -> str | None:
    """Why AMX's tiles cannot be used here; ``None`` where they can.

    Asks for leave, which this process and its threads then have.
    """
    if not _has_leave():
        return "the operating system does not give this process leave to use AMX"
    ended = _ended(lambda: kernels_are_exact("amx"))
    return None if ended == 0 else f"the self-test ended with {_in_words(ended)}"


def _has_leave() -> bool:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    return bool(call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def _ended(trial: Callable[[], bool]) -> int | None:
    """How a child ends that makes the trial: 0 if it succeeds, −n by signal n, ``None`` never."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are other threads
        with global_compiler_lock:
            child = os.fork()
            if child == 0:
                _try_and_exit(trial)
    limit = time.monotonic() + _PATIENCE
    while time.monotonic() < limit:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)  # another lock that a thread held which the child lacks
    os.waitpid(child, 0)
    return None


def _try_and_exit(trial: Callable[[], bool]) -> None:
    code = 1
    try:
        import resource  # not on every system

        faulthandler.disable()  # what ends the child is the answer, not an accident
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        code = 0 if trial() else 1
    finally:
        os._exit(code)  # none of the parent's buffers, threads and handlers are the child's


def _in_words(ended: int | None) -> str:
    if ended is None:
        return "no answer"
    return f"signal {-ended}" if ended < 0 else "wrong results"
