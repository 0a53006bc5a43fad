"""Memory of freed results is used again, and never while anything still shows it."""

from __future__ import annotations

import threading
import tracemalloc

import pytest
import torch
from torch import Tensor

from bevquant_quantizers import fake_quantize

pytest.importorskip("numba", reason="numba is not installed")

SHAPE = (512, 1024)  # 2 MiB of float32
AMAX = torch.tensor(127.0)  # integers stay as they are


def whole(value: float, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """A result, every element of which is the value."""
    return fake_quantize(torch.full(shape, float(value)), AMAX, backend="numba")


def test_memory_comes_back_with_its_last_view() -> None:
    y = whole(3.0)
    address, view = y.data_ptr(), y[3:, 5]
    del y
    others = [whole(4.0) for _ in range(6)]
    assert address not in {other.data_ptr() for other in others}
    assert bool((view == 3).all())
    del view
    more = [whole(5.0) for _ in range(33)]  # at most 32 blocks lay idle, in any order
    assert address in {other.data_ptr() for other in more}


def test_what_lies_idle_is_bounded() -> None:
    whole(1.0)
    tracemalloc.start()
    try:
        held = [whole(1.0) for _ in range(80)]
        assert tracemalloc.get_traced_memory()[0] > 47 << 21  # at most 32 lay idle before
        large = whole(1.0, (1 << 25,))  # 128 MiB: left to the C library
        del held, large
        assert tracemalloc.get_traced_memory()[0] < 33 << 21
    finally:
        tracemalloc.stop()


def test_blocks_begin_at_a_cache_line() -> None:
    assert all(whole(1.0, (1 << k,)).data_ptr() % 64 == 0 for k in range(18, 24))


def test_threads_never_share_a_block() -> None:
    clashes: list[int] = []

    def fill(value: int) -> None:
        for _ in range(50):
            if not bool((whole(value) == value).all()):
                clashes.append(value)

    threads = [threading.Thread(target=fill, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
