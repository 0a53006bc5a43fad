"""Run one kernel on several parts of an array at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count, pairwise
from typing import TypeVar

import torch

Result = TypeVar("Result")

# Below this many elements a part costs less than handing it to a thread.
_SMALLEST_PART = 1 << 16


def run_parts(
    kernel: Callable[[int, int], Result], size: int, *, elements: int | None = None, each: int = 1
) -> list[Result]:
    """Call ``kernel(start, stop)`` on parts that cover 0 … size; their results in order."""
    threads = torch.get_num_threads()
    parts = min(each * threads, (elements or size) // _SMALLEST_PART, size)
    if threads < 2 or parts < 2:
        return [kernel(0, size)]
    bounds = list(pairwise(size * i // parts for i in range(parts + 1)))
    results: dict[int, Result] = {}
    tickets = count()

    # Whoever is free takes the next part, so that a thread that wakes late takes fewer. A kernel
    # must release the GIL to gain from it.
    def work() -> None:
        while (number := next(tickets)) < parts:
            results[number] = kernel(*bounds[number])

    waiting = [_pool(os.getpid()).submit(work) for _ in range(min(threads, parts) - 1)]
    try:
        work()
    finally:  # no thread may write into an array whose owner has gone
        for future in waiting:
            future.exception()
    for future in waiting:
        future.result()
    return [results[number] for number in range(parts)]


@cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """One pool a process: threads do not survive a fork."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="bevquant")
