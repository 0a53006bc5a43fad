"""Work shared among threads: every call once, whoever comes late, fails or forks."""

import ctypes
import gc
import os
import threading
import time
import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
from bevquant_int8sim import int8_conv2d
from bevquant_sparse.runtime import task_board
from bevquant_sparse.runtime.threads import drain_together, in_parts, share


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_every_call_once(threads, count):
    for _ in range(20):
        calls = np.zeros(count, np.int64)

        def work(index, calls=calls):
            calls[index] += 1

        share(work, count)
        assert (calls == 1).all()


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_parts_cover_the_whole_in_order(threads, count):
    bounds = in_parts(lambda first, stop: (first, stop), count, 100)
    assert (bounds[0][0], bounds[-1][1]) == (0, count)
    assert all(one[1] == two[0] for one, two in pairwise(bounds))
    assert len(bounds) == (1 if count < 200 else min(10, 3 * torch.get_num_threads()))


def test_several_threads_call(threads):
    wrong = []

    def caller():
        for count in range(100):
            calls = [0] * count

            def work(index, calls=calls):
                calls[index] += 1

            share(work, count)
            wrong.append(calls != [1] * count)

    callers = [threading.Thread(target=caller) for _ in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert len(wrong) == 400
    assert not any(wrong)


def test_work_within_work(threads):
    found = []
    share(lambda i: share(lambda j: found.append((i, j)), 3), 4)
    assert sorted(found) == [(i, j) for i in range(4) for j in range(3)]


def test_errors_reach_the_caller(threads):
    def work(index):
        if index == 5:
            raise KeyError("five")

    for _ in range(20):
        with pytest.raises(KeyError, match="five"):
            share(work, 10)
    found = []
    share(found.append, 10)
    assert sorted(found) == list(range(10))


def test_nothing_is_kept(threads):
    class Block:
        pass

    block = Block()
    gone = weakref.ref(block)
    share(lambda _, block=block: None, 8)
    del block
    for _ in range(100):  # a thread that came late lets go in its own time
        gc.collect()
        if gone() is None:
            break
        threading.Event().wait(0.01)
    assert gone() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_has_threads_of_its_own(threads):
    share(lambda _: None, 8)
    child = os.fork()
    if child == 0:
        found = []
        share(found.append, 100)
        os._exit(0 if sorted(found) == list(range(100)) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.bits
def test_several_threads_run_kernels(threads):
    """One table is drained together, the others alone, and none is drained twice or not at all."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-128, 128, (1, 64, 24, 24), dtype=torch.int8, generator=generator)
    weights = torch.randint(-128, 128, (3, 64, 64, 3, 3), dtype=torch.int8, generator=generator)
    expected = [torch.nn.functional.conv2d(x.double(), w.double(), padding=1) for w in weights]
    wrong = []

    def caller(first):
        for number in range(first, first + 90):
            made = int8_conv2d(x, weights[number % 3], padding=1)
            if not torch.equal(made.double(), expected[number % 3]):
                wrong.append(number)

    callers = [threading.Thread(target=caller, args=(first,)) for first in range(4)]
    for one in callers:
        one.start()
    for one in callers:
        one.join()
    assert not wrong


@pytest.mark.parametrize("pause", [0, 1e-3])  # longer than a member looks for work
def test_a_stage_begins_when_the_one_before_is_done(threads, pause):
    done = []

    @ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)
    def kernel(stage, number, place):
        assert place == 7
        if number < 0:
            time.sleep(pause)
        done.append((stage, number))

    address = ctypes.cast(kernel, ctypes.c_void_p).value
    sizes = [5, 1, 3, 0, 4, 1, 2] * 4
    stages = [[(s, i if n > 1 else -1) for i in range(n)] for s, n in enumerate(sizes)]
    rows = np.array([(address, *task, 5) for stage in stages for task in stage], np.int64)
    stops = np.cumsum(sizes)
    for _ in range(3):
        done.clear()
        drain_together(rows.ctypes.data, stops, 2)
        first = 0
        for stage, stop in zip(stages, stops, strict=True):
            assert sorted(done[first:stop]) == stage
            first = stop
        assert len(done) == first


def test_a_member_that_comes_late_finds_nothing(threads):
    board = task_board.new_board(2)
    address = board.ctypes.data
    rows = np.zeros((0, 4), np.int64)
    stops = np.zeros(1, np.int64)
    assert task_board.lead(address, rows.ctypes.data, stops.ctypes.data, 0, 1, 0, 2, 10) == 1
    assert task_board.serve(address, 1, 0, 10) == 2  # the turn is seen, the board is closed
    board[0] = 3
    assert task_board.serve(address, 1, 2, 10) == 3  # work that is not on the board
    assert task_board.serve(address, 1, 3, 10) == 3
