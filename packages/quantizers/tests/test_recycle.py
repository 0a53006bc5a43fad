"""Memory of freed results is used again, and never while anything still shows it."""

from __future__ import annotations

import threading

import numpy as np
import torch

from bevquant_quantizers import _recycle

SHAPE = (512, 1024)  # 2 MiB of float32


def test_memory_comes_back_with_its_last_view() -> None:
    _recycle._idle.clear()
    array = _recycle.empty(SHAPE, np.float32)
    address = array.ctypes.data
    view = torch.from_numpy(array)[3:, 5]
    del array
    assert _recycle.empty(SHAPE, np.float32).ctypes.data != address
    view.fill_(7)
    assert bool((view == 7).all())
    del view
    _recycle._idle.rotate(1)
    assert address in {
        _recycle.empty(SHAPE, np.float32).ctypes.data,
        _recycle.empty(SHAPE, np.float32).ctypes.data,
    }


def test_what_lies_idle_is_bounded() -> None:
    held = [_recycle.empty(SHAPE, np.float32) for _ in range(20)]
    held.append(_recycle.empty((1 << 24,), np.float32))  # 64 MiB: left to the C library
    del held
    assert len(_recycle._idle) <= 4
    assert all(block.nbytes <= 1 << 25 for block in _recycle._idle)


def test_blocks_begin_at_a_cache_line() -> None:
    assert all(_recycle.empty((1 << k,), np.float32).ctypes.data % 64 == 0 for k in range(18, 24))


def test_threads_never_share_a_block() -> None:
    clashes: list[int] = []

    def fill(value: int) -> None:
        for _ in range(50):
            array = _recycle.empty(SHAPE, np.int32)
            array[:] = value
            if not bool((array == value).all()):
                clashes.append(value)

    threads = [threading.Thread(target=fill, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
