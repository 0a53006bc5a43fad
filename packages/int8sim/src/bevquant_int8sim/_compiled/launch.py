"""Run kernels over all tiles of a layer, on all of torch's threads, once or again and again.

Threads take tasks from a table in memory until none is left, without Python in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bevquant_int8sim._compiled.amx_loops import COLUMNS
from bevquant_int8sim._compiled.dot_product import FLIP
from bevquant_int8sim._compiled.ir import LANES
from bevquant_int8sim._compiled.kernels import kernel
from bevquant_int8sim._compiled.packed import PackedWeight
from bevquant_int8sim._compiled.parameters import P
from bevquant_int8sim._tile_output import Requantization
from bevquant_sparse.runtime.task_board import drain, new_cell
from bevquant_sparse.runtime.threads import drain_together

_TASKS_A_THREAD = 16  # the last one is all that others may have to wait for
_SMALLEST = 2_000_000  # products of a task: 5 µs with VNNI

Work = tuple[int, int, int, int]
"""Address of a kernel, number of its tiles, products in all, and where its parameters lie."""


@dataclass(frozen=True, eq=False)
class Tasks:
    """Parts of some works, as `task_board.drain` takes them.

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
    for address, tiles, products, place in works:
        parts = max(1, min(tiles, products // size))
        for part in range(parts):
            rows.append((address, tiles * part // parts, tiles * (part + 1) // parts, place))
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


_WORTH_SHARING = 4_000_000  # products below which another thread costs more than it brings


@dataclass(frozen=True, eq=False)
class Call:
    """A kernel, its parameters, and how much there is to do.

    Attributes:
        kernel: Address of the kernel, a C function ``void(first tile, last tile + 1, parameters)``.
        parameters: int64, by `P`.
        tiles: Number of tiles.
        products: Multiplications in all.
        held: What the parameters point to.
    """

    kernel: int
    parameters: npt.NDArray[np.int64]
    tiles: int
    products: int
    held: tuple[Any, ...]

    def work(self, place: int) -> Work:
        """The call with its parameters at `place`."""
        return self.kernel, self.tiles, self.products, place


def kernel_calls(
    job: str,
    tables: dict[P, npt.NDArray[Any]],
    num_tiles: int,
    seen: int,
    inputs: npt.NDArray[Any],
    packed: PackedWeight,
    init: npt.NDArray[np.int32],
    out: npt.NDArray[Any],
    output: Requantization | None,
) -> list[Call]:
    """A call for each group of output channels.

    Args:
        job: ``"sparse"`` or ``"grid"``.
        tables: The lists that say which inputs meet which outputs.
        num_tiles: Number of tiles.
        seen: Input rows that all tiles together multiply.
        inputs: ``[rows, at least the padded inputs]`` as the kernel reads them.
        packed: The weight.
        init: int32 ``[padded outputs]``: what accumulators begin with.
        out: ``[rows, at least the padded outputs]``: int32, or int8 where `output` is given.
        output: How accumulators become int8, or ``None``.
    """
    limits = None if output is None else output.limits()
    singles = None if output is None else output.singles()
    calls = []
    for group in packed.groups:
        p = np.zeros(len(P), np.int64)
        for place, value in tables.items():
            p[place] = value.ctypes.data
        p[P.INPUT], p[P.INPUT_STRIDE] = inputs.ctypes.data, inputs.strides[0]
        p[P.ABSENT], p[P.FLIP] = packed.absent.ctypes.data, FLIP.ctypes.data
        p[P.VOLUME], p[P.STEPS] = packed.volume, packed.steps
        if packed.kind == "amx":
            p[P.TILES], p[P.STEP_BYTES] = packed.tiles.ctypes.data, packed.step_channels
            p[P.PAIRS] = group.vectors * LANES // COLUMNS
        p[P.WEIGHT] = group.weight.ctypes.data
        p[P.INIT] = init[group.first :].ctypes.data
        if job == "sparse" and group.offset_init is not None:
            p[P.OFFSET_INIT] = group.offset_init.ctypes.data
        p[P.OUT] = out.ctypes.data + group.first * out.itemsize
        p[P.OUT_STRIDE] = out.strides[0]
        if output is not None and limits is not None and singles is not None:
            p[P.MULTIPLIER] = output.multiplier[group.first :].ctypes.data
            p[P.LIMITS] = limits.ctypes.data
            p[P.SINGLES] = singles[group.first :].ctypes.data
            if output.residual is not None:
                p[P.RESIDUAL] = output.residual.rows.ctypes.data + group.first
                p[P.RESIDUAL_STRIDE] = output.residual.rows.strides[0]
        loop = kernel(packed.kind, job, packed.rows, group.vectors)
        products = seen * packed.padded_inputs * group.vectors * 16
        held = (tables, inputs, packed, init, out, output, limits, singles)
        calls.append(Call(loop.address, p, num_tiles, products, held))
    return calls


def threads_for(products: int) -> int:
    """Threads that so many products are worth."""
    return torch.get_num_threads() if products > _WORTH_SHARING else 1


def run_calls(calls: Sequence[Call]) -> None:
    """Run all calls on all of torch's threads; they write disjoint places."""
    threads = threads_for(sum(call.products for call in calls))
    works = [call.work(call.parameters.ctypes.data) for call in calls]
    run_tasks(cut(works, threads))


class RepeatedCalls:
    """Calls that write disjoint places, as a table of parameters in which three addresses change.

    Args:
        calls: The calls, made for these arrays, whose memory is not needed afterwards.
        inputs: The array whose memory they read.
        out: The array that they write.
        added: The residual's rows, or ``None``.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        inputs: npt.NDArray[Any],
        out: npt.NDArray[Any],
        added: npt.NDArray[Any] | None = None,
    ) -> None:
        self._table = np.stack([call.parameters for call in calls])
        self._table[:, P.INPUT] -= inputs.ctypes.data
        self._table[:, P.OUT] -= out.ctypes.data
        if added is not None:
            self._table[:, P.RESIDUAL] -= added.ctypes.data
        self._adds = added is not None
        size = self._table.strides[0]
        self._works = [call.work(row * size) for row, call in enumerate(calls)]
        self._products = sum(call.products for call in calls)
        self._held = [tuple(_without(call.held, inputs, out)) for call in calls]
        self._tasks: dict[int, Tasks] = {}

    def run(self, inputs: int, out: int, added: int = 0) -> None:
        """Make the calls on memory of the same shape and layout at other addresses."""
        table = self._table.copy()
        table[:, P.INPUT] += inputs
        table[:, P.OUT] += out
        if self._adds:
            table[:, P.RESIDUAL] += added
        threads = threads_for(self._products)
        tasks = self._tasks.get(threads)
        if tasks is None:
            tasks = self._tasks[threads] = cut(self._works, threads)
        run_tasks(tasks, table.ctypes.data)


def _without(held: Any, *arrays: npt.NDArray[Any]) -> list[Any]:
    """What calls need, but for these arrays' memory."""

    def shares(value: Any) -> bool:
        return isinstance(value, np.ndarray) and any(
            np.may_share_memory(value, array) for array in arrays
        )

    kept = [v.multiplier if isinstance(v, Requantization) else v for v in held]
    return [value for value in kept if not shares(value)]
