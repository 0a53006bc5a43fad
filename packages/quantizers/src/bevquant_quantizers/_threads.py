"""Run one kernel on several parts of an array at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch

__all__ = ["run_parts"]

Result = TypeVar("Result")

# Below this many elements a part costs less than handing it to a thread.
_SMALLEST_PART = 1 << 16


def run_parts(
    kernel: Callable[[int, int], Result], size: int, *, elements: int | None = None
) -> list[Result]:
    """Call ``kernel(start, stop)`` on parts that cover 0 … size, and return the results in order.

    The kernel must release the GIL to gain from it. Parts are as many as torch has threads, fewer
    where they would be small; the caller takes the first itself.

    Args:
        kernel: Called with the bounds of each part.
        size: What is divided, e.g. rows.
        elements: How much work the whole is, where `size` is not that.
    """
    parts = min(torch.get_num_threads(), (elements or size) // _SMALLEST_PART, size)
    if parts < 2:
        return [kernel(0, size)]
    bounds = [size * i // parts for i in range(parts + 1)]
    waiting = [_pool(os.getpid()).submit(kernel, *pair) for pair in pairwise(bounds[1:])]
    try:
        return [kernel(0, bounds[1]), *(future.result() for future in waiting)]
    finally:  # no thread may write into an array whose owner has gone
        for future in waiting:
            future.exception()


@cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """One pool a process: threads do not survive a fork."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="bevquant")
