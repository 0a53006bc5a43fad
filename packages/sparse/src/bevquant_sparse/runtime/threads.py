"""Work shared among threads of our own: safe under fork and under concurrent callers.

Numba's own parallel layers are neither: ``workqueue`` aborts on concurrent use and GNU OpenMP
aborts in a forked child, so a data loader's worker could kill the process. The kernels here
release the GIL and write disjoint places, which is all that plain threads need. A layer is shorter
than it takes to wake a thread ten times, so threads stay awake for a moment after each call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from itertools import count as counter
from threading import Lock, Thread
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from bevquant_sparse.runtime.task_board import (
    TURN,
    changed,
    drain,
    lead,
    new_board,
    new_cell,
    patience,
    serve,
    set_asleep,
    settled,
)

Result = TypeVar("Result")

_BLOCK = 1 << 16  # values of a line
_PARTS = 3  # of a thread, so that one that comes late costs little


class _Job:
    """Calls that so many threads take from, each of them first from a lane of its own."""

    def __init__(self, work: Callable[[int], object], count: int, threads: int) -> None:
        self.error: BaseException | None = None
        self._work, self._count, self._finished = work, count, counter(1)
        bounds = [count * lane // threads for lane in range(threads + 1)]
        self._lanes = [iter(range(*ends)) for ends in pairwise(bounds)]
        self._done, self._gate = new_cell(), Lock()
        self._gate.acquire()

    def take_part(self, lane: int) -> None:
        """Make calls until none is left; after an error the rest are only counted."""
        for index in chain(*self._lanes[lane:], *self._lanes[:lane]):
            try:
                if self.error is None:
                    self._work(index)
            except BaseException as error:
                self.error = error
            if next(self._finished) == self._count:
                self._done[0] = 1
                self._gate.release()

    def wait(self) -> None:
        """Wait for the calls that other threads still make."""
        if not changed(self._done, 0):
            self._gate.acquire()


class ThreadPool:
    """Threads that take part in the newest job. Who comes late finds nothing left to do."""

    def __init__(self, size: int) -> None:
        self._lock, self._leading = Lock(), Lock()
        self._board = new_board(size + 1)
        self._address = self._board.ctypes.data
        self._turns = 0
        self._job: _Job | None = None
        self._asleep: list[Lock] = []
        for number in range(size):
            Thread(
                target=self._serve, args=(number + 1,), name=f"bevquant-{number}", daemon=True
            ).start()

    def run(self, job: _Job) -> None:
        """Work on `job` together with the pool."""
        with self._lock:
            self._job = job
            self._turns += 2 - (self._turns + 1) % 2  # to the next odd number
            self._board[TURN] = self._turns
        self._wake()
        job.take_part(0)
        job.wait()
        with self._lock:
            if self._job is job:
                self._job = None  # what it refers to may be large

    def drain(self, tasks: int, stops: npt.NDArray[np.int64], base: int) -> bool:
        """Drain stages of tasks together; False if another thread's are being drained."""
        if not self._leading.acquire(blocking=False):
            return False
        stage, stages, address = 0, len(stops), stops.ctypes.data
        try:
            with self._lock:
                turn = self._turns + 2 - self._turns % 2  # the next even number
                self._turns = turn + 2 * (stages - 1)
            while stage < stages:
                self._wake()
                stage = lead(self._address, tasks, address, stage, stages, base, turn, patience())
                if stage < 0:
                    self._leave()
                    stage = -stage
        finally:
            self._leave()  # an error may have come
            self._leading.release()
        return True

    def _leave(self) -> None:
        """Wait for a member that lost its CPU to leave the board."""
        while not settled(self._address, 1):
            time.sleep(0)

    def _wake(self) -> None:
        with self._lock:
            asleep, self._asleep = self._asleep, []
            set_asleep(self._board, 0)
        for gate in asleep:
            gate.release()

    def _serve(self, lane: int) -> None:
        gate, seen = Lock(), 0
        gate.acquire()
        while True:
            before, seen = seen, serve(self._address, lane, seen, patience())
            if seen % 2 and seen != before:
                with self._lock:
                    job = self._job
                if job is not None:
                    job.take_part(lane)
                del job
                continue
            with self._lock:
                idle = int(self._board[TURN]) == seen
                if idle:
                    self._asleep.append(gate)
                    set_asleep(self._board, len(self._asleep))
            if idle:
                gate.acquire()


_lock = Lock()
_pools: dict[tuple[int, int], ThreadPool] = {}


def _pool(size: int) -> ThreadPool:
    # Threads do not survive a fork, so a child process gets a pool of its own.
    key = (os.getpid(), size)
    with _lock:
        if key not in _pools:
            _pools[key] = ThreadPool(size)
        return _pools[key]


def share(work: Callable[[int], object], count: int) -> None:
    """Call ``work(0) … work(count − 1)``, each once, on up to ``torch.get_num_threads()`` threads.

    The calling thread takes part. Which thread runs which call is left open: calls must write
    disjoint places. The first error that a call raises is raised here, once no call runs any more.
    """
    threads = min(torch.get_num_threads(), count)
    if threads <= 1:
        for index in range(count):
            work(index)
        return
    job = _Job(work, count, torch.get_num_threads())
    _pool(torch.get_num_threads() - 1).run(job)
    if job.error is not None:
        raise job.error


def in_chunks(work: Callable[[int, int], object], count: int, chunk: int) -> None:
    """Call ``work(first, stop)`` for parts of ``0 … count`` of that size, as `share` does."""
    share(lambda i: work(i * chunk, min((i + 1) * chunk, count)), -(-count // chunk))


def in_parts(work: Callable[[int, int], Result], count: int, smallest: int) -> list[Result]:
    """The same for few parts, each of at least about `smallest`: every one costs Python's time.

    Returns the results in order.
    """
    parts = max(1, min(count // smallest, _PARTS * torch.get_num_threads()))
    results: dict[int, Result] = {}

    def part(number: int) -> None:
        results[number] = work(count * number // parts, count * (number + 1) // parts)

    share(part, parts)
    return [results[number] for number in range(parts)]


def address(array: npt.NDArray[Any]) -> int:
    """Where an array's memory begins; ``array.ctypes`` takes three times as long."""
    place: int = array.__array_interface__["data"][0]
    return place


def drain_together(
    tasks: int, stops: npt.NDArray[np.int64], base: int, *, alone: bool = False
) -> None:
    """Run tables of tasks (see `task_board.drain`) on ``torch.get_num_threads()`` threads.

    Python has no part in it but for the first and the last microsecond. While another thread does
    the same, this one works alone. `base` is added to where each task's parameters lie.
    """
    threads = 1 if alone else torch.get_num_threads()
    if threads == 1 or not _pool(threads - 1).drain(tasks, stops, base):
        counter = new_cell()
        drain(address(counter), tasks, int(stops[-1]), base)


def lines_of(
    kernel: Callable[..., object], fields: int, arrays: Sequence[npt.NDArray[Any]], *settings: Any
) -> npt.NDArray[np.float64]:
    """A line of `fields` numbers for each block of values: sums that do not depend on the threads.

    ``kernel(*blocks, *settings, line)`` fills the line, zeros at first, of one block of each array.
    """
    count = len(arrays[0])
    lines = np.zeros((-(-count // _BLOCK), fields))

    def run(first: int, stop: int) -> None:
        kernel(*(values[first:stop] for values in arrays), *settings, lines[first // _BLOCK])

    in_chunks(run, count, _BLOCK)
    return lines
