"""Memory of large results that were freed, handed to the next ones.

The C library gives large blocks back to the system as soon as they are freed, so that each new
20 MB tensor costs thousands of page faults and as many pages set to zero: more time than
fake-quantizing into it takes. CUDA allocators keep such blocks, and so does this one, a few.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

_SMALLEST, _LARGEST = 1 << 20, 1 << 25  # bytes; below the C library reuses by itself
_LINE = 64  # bytes of a cache line, at whose start each block begins
# A full deque drops its oldest: at most 128 MiB lie idle. Its methods are atomic, which matters
# because a block may come back at any moment, in any thread and within a garbage collection.
_idle: deque[Any] = deque(maxlen=4)


class _Lease:
    """Shows a block to numpy, which keeps this object as long as any array or tensor needs it."""

    def __init__(self, block: Any) -> None:
        # Held here: a module's names are gone when the interpreter shuts down.
        self.idle, self.block = _idle, block
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        self.idle.append(self.block)


def empty(shape: tuple[int, ...], dtype: type) -> Any:
    """Return an uninitialised array, in memory that an earlier one no longer uses where some fits.

    The memory comes back when the last array or tensor that shows it is gone.
    """
    size = math.prod(shape)
    nbytes = size * np.dtype(dtype).itemsize
    if not _SMALLEST <= nbytes <= _LARGEST:
        return np.empty(shape, dtype)
    return np.asarray(_Lease(_take(nbytes)))[:nbytes].view(dtype).reshape(shape)


def _take(nbytes: int) -> Any:
    """Return an idle block of at most twice the size, or a new one."""
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
