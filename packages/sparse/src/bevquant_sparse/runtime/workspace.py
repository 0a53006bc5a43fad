"""Memory for intermediate results, handed on from one layer and one frame to the next.

The C library gives large blocks back to the system as soon as they are freed, so every new array
of a megabyte costs hundreds of page faults: on a sparse encoder more time than a convolution.
"""

from __future__ import annotations

import math
from threading import RLock
from typing import Any

import numpy as np

_LINE = 64  # bytes of a cache line, at whose start each block begins
_SMALLEST = 1 << 14  # bytes; below, the C library hands blocks on by itself
_BUDGET = 1 << 26  # bytes that lie idle at most


class _Pool:
    """Blocks that nothing uses, oldest first."""

    def __init__(self) -> None:
        self._blocks: list[Any] = []
        self._bytes, self._budget = 0, _BUDGET
        # Reentrant: a block may come back in a garbage collection that begins within `take`.
        self._lock = RLock()

    def take(self, nbytes: int) -> Any:
        """The smallest block that is large enough and not twice too large, or a new one."""
        with self._lock:
            best, size = -1, 2 * nbytes + 1
            for place, block in enumerate(self._blocks):
                if nbytes <= block.nbytes < size:
                    best, size = place, block.nbytes
            if best >= 0:
                self._bytes -= size
                return self._blocks.pop(best)
        return _new(nbytes)

    def give_back(self, block: Any) -> None:
        """Keep a block for later, in place of the oldest ones where there are too many."""
        if block.nbytes > self._budget:
            return  # all others would have to go
        with self._lock:
            self._blocks.append(block)
            self._bytes += block.nbytes
            while self._bytes > self._budget:
                self._bytes -= self._blocks.pop(0).nbytes


class _Buffer:
    """Shows a block to numpy, which keeps this object as long as any array or tensor needs it."""

    def __init__(self, pool: _Pool, block: Any) -> None:
        # The pool is held here: a module's names are gone when the interpreter shuts down. The
        # block is taken before: without memory there is nothing to give back.
        self._pool, self._block = pool, block
        self.__array_interface__ = self._block.__array_interface__

    def __del__(self) -> None:
        self._pool.give_back(self._block)


_pool = _Pool()


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """An uninitialised array that starts on a cache line, where possible in used memory."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < _SMALLEST:
        return _new(max(nbytes, 1))[:nbytes].view(dtype).reshape(shape)
    return np.asarray(_Buffer(_pool, _pool.take(nbytes)))[:nbytes].view(dtype).reshape(shape)


def _new(nbytes: int) -> Any:
    raw = np.empty(nbytes + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + nbytes]
