"""Work shared among threads of our own: safe under fork and under concurrent callers.

Numba's own parallel layers are neither: ``workqueue`` aborts on concurrent use and GNU OpenMP
aborts in a forked child, so a data loader's worker could kill the process. The kernels here
release the GIL and write disjoint places, which is all that plain threads need.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count as counter
from threading import Lock

import torch

_lock = Lock()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def _pool(workers: int) -> ThreadPoolExecutor:
    # Threads do not survive a fork, so a child process gets a pool of its own.
    key = (os.getpid(), workers)
    with _lock:
        if key not in _pools:
            _pools[key] = ThreadPoolExecutor(workers, thread_name_prefix="bevquant-int8")
        return _pools[key]


def share(work: Callable[[int], object], count: int) -> None:
    """Call ``work(0) … work(count − 1)``, each once, on up to ``torch.get_num_threads()`` threads.

    The calling thread takes part. Which thread runs which call is left open: calls must write
    disjoint places.
    """
    threads = min(torch.get_num_threads(), count)
    if threads <= 1:
        for index in range(count):
            work(index)
        return
    tickets = counter()

    def run() -> None:
        while (index := next(tickets)) < count:
            work(index)

    helpers = [_pool(threads - 1).submit(run) for _ in range(threads - 1)]
    try:
        run()
    finally:
        for helper in helpers:
            helper.result()
