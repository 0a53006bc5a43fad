"""Whether this process may use AMX's tiles: the kernel's leave, and a trial that cannot hurt.

Linux gives a process the 8 KiB of tile registers when it asks (``arch_prctl``,
``ARCH_REQ_XCOMP_PERM``, component 18; Documentation/arch/x86/xstate.rst); without leave, as under
some sandboxes, the first tile instruction ends the process, and so would a CPU or a compiler that
does less than it says. The self-test is therefore run in a forked child first.
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

from bevquant_int8sim._compiled.self_test import kernels_are_exact

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_PATIENCE = 60.0  # seconds; the kernels compile in one or two


def refusal() -> str | None:
    """Why the tiles cannot be used here; ``None`` where they can.

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
        child = os.fork()
    if child == 0:
        _try_and_exit(trial)
    limit = time.monotonic() + _PATIENCE
    while time.monotonic() < limit:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)  # a lock, held by a thread that the child does not have
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
