"""Two processes of torch.distributed, as threads that wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

__all__ = ["on_two_ranks"]


class Together:
    """torch.distributed for two threads, which each are a process."""

    def __init__(self):
        self.rank = threading.local()
        self.barrier = threading.Barrier(2, timeout=300)
        self.posted = [None, None]

    def is_available(self):
        return True

    is_initialized = is_available

    def get_rank(self):
        return self.rank.value

    def get_world_size(self):
        return 2

    def all_gather_object(self, replies, own):
        self.posted[self.rank.value] = own
        self.barrier.wait()
        replies[:] = self.posted
        self.barrier.wait()


def on_two_ranks(work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` gives on each rank, or the error with which it ends there."""
    together = Together()

    def tried(rank: int) -> Any:
        together.rank.value = rank
        try:
            return work(rank)
        except (ValueError, RuntimeError) as error:
            return error

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr("bevquant_qnn._ranks.dist", together)
        return list(pool.map(tried, (0, 1)))
