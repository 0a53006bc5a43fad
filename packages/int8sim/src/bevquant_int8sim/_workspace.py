"""Memory for intermediate results, handed on from one layer and one frame to the next.

The C library gives large blocks back to the system as soon as they are freed, so every new array
of a megabyte costs hundreds of page faults: on a sparse encoder more time than a convolution.
"""

from __future__ import annotations

import math
from threading import RLock
from typing import Any

import numpy as np

__all__ = ["empty", "with_absent_row"]

_LINE = 64  # bytes of a cache line, at whose start each block begins
_SMALLEST = 1 << 14  # bytes; below, the C library hands blocks on by itself
_BUDGET = 1 << 26  # bytes that lie idle at most
_idle: list[Any] = []  # oldest first
# Reentrant: a block may come back in a garbage collection that begins while another is taken.
_lock = RLock()


class _Lease:
    """Shows a block to numpy, which keeps this object as long as any array or tensor needs it."""

    def __init__(self, block: Any) -> None:
        self.block = block
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        with _lock:
            _idle.append(self.block)
            excess = sum(block.nbytes for block in _idle) - _BUDGET
            while excess > 0:
                excess -= _idle.pop(0).nbytes


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """An uninitialised array that starts on a cache line, where possible in used memory."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < _SMALLEST:
        return _new(max(nbytes, 1))[:nbytes].view(dtype).reshape(shape)
    return np.asarray(_Lease(_take(nbytes)))[:nbytes].view(dtype).reshape(shape)


def with_absent_row(rows: int, columns: int, dtype: Any) -> tuple[Any, Any]:
    """``(row before the first, [rows, columns])``: one block whose row 0 starts on a cache line."""
    width = columns * np.dtype(dtype).itemsize
    before = -(-width // _LINE) * _LINE
    block = empty((before + rows * width,), np.uint8)
    absent, values = block[before - width : before], block[before:]
    return absent.view(dtype), values.view(dtype).reshape(rows, columns)


def _take(nbytes: int) -> Any:
    """The smallest idle block that is large enough and not twice too large, or a new one."""
    with _lock:
        fitting = [b for b in _idle if nbytes <= b.nbytes <= 2 * nbytes]
        if fitting:
            best = min(fitting, key=lambda block: block.nbytes)
            _idle[:] = [block for block in _idle if block is not best]
            return best
    return _new(nbytes)


def _new(nbytes: int) -> Any:
    raw = np.empty(nbytes + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + nbytes]
