"""Memory for intermediate results, handed on from one layer to the next.

The C library gives large blocks back to the system as soon as they are freed, so every new tensor
of a megabyte costs hundreds of page faults: on a sparse encoder more time than a convolution.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

__all__ = ["empty", "with_absent_row"]

_LINE = 64  # bytes of a cache line, at whose start each block begins
_SMALLEST = 1 << 14  # bytes; below, the C library hands blocks on by itself
_LARGEST = 1 << 26
# A full deque drops its oldest. Its methods are atomic, which matters because a block may come
# back at any moment, in any thread and within a garbage collection.
_idle: deque[Any] = deque(maxlen=8)


class _Lease:
    """Shows a block to numpy, which keeps this object as long as any array or tensor needs it."""

    def __init__(self, block: Any) -> None:
        self.block = block
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        _idle.append(self.block)


def empty(shape: tuple[int, ...], dtype: type) -> Any:
    """An uninitialised array that starts on a cache line, where possible in used memory."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    block = _take(max(nbytes, 1))
    held = np.asarray(_Lease(block)) if _SMALLEST <= nbytes <= _LARGEST else block
    return held[:nbytes].view(dtype).reshape(shape)


def with_absent_row(rows: int, columns: int, dtype: type) -> tuple[Any, Any]:
    """``(row before the first, [rows, columns])``: one block whose row 0 starts on a cache line."""
    width = columns * np.dtype(dtype).itemsize
    before = -(-width // _LINE) * _LINE
    block = empty((before + rows * width,), np.uint8)
    absent, values = block[before - width : before], block[before:]
    return absent.view(dtype), values.view(dtype).reshape(rows, columns)


def _take(nbytes: int) -> Any:
    for _ in range(len(_idle)):
        try:
            block = _idle.popleft()
        except IndexError:  # another thread took the last one
            break
        if nbytes <= block.nbytes <= 2 * nbytes:
            return block
        _idle.append(block)
    raw = np.empty(nbytes + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + nbytes]
