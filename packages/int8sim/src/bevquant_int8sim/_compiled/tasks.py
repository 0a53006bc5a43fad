"""Tasks that threads take from a table in memory until none is left, without Python in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bevquant_int8sim._compiled.crew import drain, new_cell
from bevquant_int8sim._compiled.threads import drain_together

_TASKS_A_THREAD = 16  # the last one is all that others may have to wait for
_SMALLEST = 2_000_000  # products of a task: 5 µs with VNNI

Work = tuple[int, int, int, int]
"""Address of a kernel, number of its tiles, products in all, and where its parameters lie."""


@dataclass(frozen=True, eq=False)
class Tasks:
    """Parts of some works, as `crew.drain` takes them.

    Attributes:
        rows: Kernel, first tile, last tile + 1, where the parameters lie.
        address: Of the rows.
        threads: How many threads the works were cut for.
    """

    rows: npt.NDArray[np.int64]
    address: int
    threads: int


def cut(works: Sequence[Work], threads: int) -> Tasks:
    """Cut works, which write disjoint places, into tasks for that many threads."""
    size = max(1, sum(products for _, _, products, _ in works))
    if threads > 1:
        size = max(_SMALLEST, size // (_TASKS_A_THREAD * threads))
    rows = []
    for kernel, tiles, products, place in works:
        parts = max(1, min(tiles, products // size))
        for part in range(parts):
            rows.append((kernel, tiles * part // parts, tiles * (part + 1) // parts, place))
    table = np.array(rows, np.int64)
    return Tasks(table, table.ctypes.data, threads)


def run_tasks(tasks: Tasks, base: int = 0) -> None:
    """Run every task once; `base` is added to where each task's parameters lie."""
    address, count = tasks.address, len(tasks.rows)
    if tasks.threads == 1:
        counter = new_cell()
        drain(counter.ctypes.data, address, count, base)
    else:
        drain_together(address, count, base)
