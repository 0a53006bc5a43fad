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
    for kernel_at, tiles, products, place in works:
        parts = max(1, min(tiles, products // size))
        for part in range(parts):
            rows.append((kernel_at, tiles * part // parts, tiles * (part + 1) // parts, place))
    table = np.array(rows, np.int64)
    return Tasks(table, address(table), threads)


def run_tasks(tasks: Tasks, base: int = 0) -> None:
    """Run every task once; `base` is added to where each task's parameters lie."""
    count = len(tasks.rows)
    if tasks.threads == 1:
        counter = new_cell()
        drain(address(counter), tasks.address, count, base)
    else:
        drain_together(tasks.address, count, base)


_WORTH_SHARING = 4_000_000  # products below which another thread costs more than it brings


@dataclass(frozen=True, eq=False)
class Call:
    """A kernel, its parameters, and how much there is to do.

    Attributes:
        kernel: Address of the kernel, a C function ``void(first tile, last tile + 1, parameters)``.
        parameters: int64, by `P`.
        tiles: Number of tiles.
        products: Multiplications in all.
        held: What the parameters point to, but for
        arrays: Inputs, outputs and what is added.
    """

    kernel: int
    parameters: npt.NDArray[np.int64]
    tiles: int
    products: int
    held: tuple[Any, ...]
    arrays: tuple[Any, ...]

    def work(self, place: int) -> Work:
        """The call with its parameters at `place`."""
        return self.kernel, self.tiles, self.products, place


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A call of a layer's kernel for a group of output channels, without its inputs and outputs.

    Attributes:
        kernel: As of a `Call`.
        parameters: int64, by `P`; those of inputs and outputs are 0.
        first: First output channel.
        products: Of an input row.
        held: What the parameters point to.
    """

    kernel: int
    parameters: npt.NDArray[np.int64]
    first: int
    products: int
    held: tuple[Any, ...]

    def on(
        self,
        tables: dict[P, npt.NDArray[Any]],
        num_tiles: int,
        seen: int,
        inputs: npt.NDArray[Any],
        out: npt.NDArray[Any],
        added: npt.NDArray[Any] | None,
    ) -> Call:
        """The call on these arrays; the arguments are those of `kernel_calls`."""
        p = self.parameters.copy()
        for place, value in tables.items():
            p[place] = address(value)
        p[P.INPUT], p[P.INPUT_STRIDE] = address(inputs), inputs.strides[0]
        p[P.OUT] = address(out) + self.first * out.itemsize
        p[P.OUT_STRIDE] = out.strides[0]
        if added is not None:
            p[P.RESIDUAL] = address(added) + self.first
            p[P.RESIDUAL_STRIDE] = added.strides[0]
        held, arrays = (self.held, tables), (inputs, out, added)
        return Call(self.kernel, p, num_tiles, seen * self.products, held, arrays)


def address(array: npt.NDArray[Any]) -> int:
    """Where an array's memory begins; ``array.ctypes`` takes three times as long."""
    place: int = array.__array_interface__["data"][0]
    return place


def layer_calls(
    job: str,
    packed: PackedWeight,
    init: npt.NDArray[np.int32],
    output: Requantization | None,
) -> list[LayerCall]:
    """A call for each group of output channels.

    Args:
        job: ``"sparse"`` or ``"grid"``.
        packed: The weight.
        init: int32 ``[padded outputs]``: what accumulators begin with.
        output: How accumulators become int8, or ``None``.
    """
    limits = None if output is None else output.limits()
    singles = None if output is None else output.singles()
    calls = []
    for group in packed.groups:
        p = np.zeros(len(P), np.int64)
        p[P.ABSENT], p[P.FLIP] = address(packed.absent), address(FLIP)
        p[P.VOLUME], p[P.STEPS] = packed.volume, packed.steps
        if packed.kind == "amx":
            p[P.TILES], p[P.STEP_BYTES] = address(packed.tiles), packed.step_channels
            p[P.PAIRS] = group.vectors * LANES // COLUMNS
        p[P.WEIGHT], p[P.INIT] = address(group.weight), address(init[group.first :])
        if job == "sparse" and group.offset_init is not None:
            p[P.OFFSET_INIT] = address(group.offset_init)
        multiplier = None
        if output is not None and limits is not None and singles is not None:
            multiplier = output.multiplier
            p[P.MULTIPLIER] = address(multiplier[group.first :])
            p[P.LIMITS], p[P.SINGLES] = address(limits), address(singles[group.first :])
        loop = kernel(packed.kind, job, packed.rows, group.vectors)
        products = packed.padded_inputs * group.vectors * LANES
        held = (packed, init, multiplier, limits, singles)
        calls.append(LayerCall(loop.address, p, group.first, products, held))
    return calls


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
    """`layer_calls` on inputs and outputs.

    Args:
        job: As there.
        tables: The lists that say which inputs meet which outputs.
        num_tiles: Number of tiles.
        seen: Input rows that all tiles together multiply.
        inputs: ``[rows, at least the padded inputs]`` as the kernel reads them.
        packed: As there.
        init: As there.
        out: ``[rows, at least the padded outputs]``: int32, or int8 where `output` is given.
        output: As there.
    """
    residual = None if output is None else output.residual
    added = None if residual is None else residual.rows
    return [
        call.on(tables, num_tiles, seen, inputs, out, added)
        for call in layer_calls(job, packed, init, output)
    ]


def threads_for(products: int) -> int:
    """Threads that so many products are worth."""
    return torch.get_num_threads() if products > _WORTH_SHARING else 1


def run_calls(calls: Sequence[Call]) -> None:
    """Run all calls on all of torch's threads; they write disjoint places."""
    threads = threads_for(sum(call.products for call in calls))
    works = [call.work(address(call.parameters)) for call in calls]
    run_tasks(cut(works, threads))


_INPUT, _OUT, _RESIDUAL = int(P.INPUT), int(P.OUT), int(P.RESIDUAL)  # numpy is slow to take P


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
        self._held = [call.held for call in calls]
        self._tasks: dict[int, Tasks] = {}

    def run(self, inputs: int, out: int, added: int = 0) -> None:
        """Make the calls on memory of the same shape and layout at other addresses."""
        table = self._table.copy()
        table[:, _INPUT] += inputs
        table[:, _OUT] += out
        if self._adds:
            table[:, _RESIDUAL] += added
        threads = threads_for(self._products)
        tasks = self._tasks.get(threads)
        if tasks is None:
            tasks = self._tasks[threads] = cut(self._works, threads)
        run_tasks(tasks, address(table))
