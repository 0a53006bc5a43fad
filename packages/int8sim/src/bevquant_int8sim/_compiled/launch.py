"""Run kernels over all tiles of a layer, on all of torch's threads, once or again and again.

Threads take tasks from a table in memory until none is left, without Python in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from bevquant_sparse.runtime.threads import address, drain_together

_TASKS_A_THREAD = 16  # the last one is all that others may have to wait for
_SMALLEST = 2_000_000  # products of a task: 5 µs with VNNI

Work = tuple[int, int, int, int]
"""Address of a kernel, number of its tiles, products in all, and where its parameters lie."""


@dataclass(frozen=True, eq=False)
class Tasks:
    """Parts of some works, as `task_board.drain` takes them."""

    # Kernel, first tile, last tile + 1, where the parameters lie.
    rows: npt.NDArray[np.int64]
    # The row before which each stage of works ends.
    stops: npt.NDArray[np.int64]
    address: int
    # Whether they are too small for a second thread.
    alone: bool

    def run(self, base: int = 0) -> None:
        """Run every task once; `base` is added to where each task's parameters lie."""
        drain_together(self.address, self.stops, base, alone=self.alone)


def cut(stages: Sequence[Sequence[Work]]) -> Tasks:
    """Cut works into tasks for torch's threads; a stage begins when the one before is done."""
    rows, stops, alone = [], [], True
    for works in stages:
        size = max(1, sum(products for _, _, products, _ in works))
        threads = torch.get_num_threads() if size > _WORTH_SHARING else 1
        if threads > 1:
            alone = False
            size = max(_SMALLEST, size // (_TASKS_A_THREAD * threads))
        tasks = []
        for kernel_at, tiles, products, place in works:
            parts = max(1, min(tiles, products // size))
            ends = [tiles * part // parts for part in range(parts + 1)]
            for part, (first, stop) in enumerate(itertools.pairwise(ends)):
                tasks.append((part / parts, (kernel_at, first, stop, place)))
        # Side by side through all works: groups of output channels read the same inputs and write
        # to the same rows, so that a thread finds both in its cache.
        tasks.sort(key=lambda task: task[0])
        rows += [row for _, row in tasks]
        stops.append(len(rows))
    table = np.array(rows, np.int64).reshape(-1, 4)
    return Tasks(table, np.array(stops), address(table), alone)


_WORTH_SHARING = 4_000_000  # products below which another thread costs more than it brings


@dataclass(frozen=True, eq=False)
class Call:
    """A kernel, its parameters, and how much there is to do."""

    # Address of the kernel, a C function ``void(first tile, last tile + 1, parameters)``.
    kernel: int
    parameters: npt.NDArray[np.int64]
    tiles: int
    products: int
    # What the parameters point to, but for
    held: tuple[Any, ...]
    # Inputs, outputs and what is added.
    arrays: tuple[Any, ...]

    def work(self, place: int) -> Work:
        """The call with its parameters at `place`."""
        return self.kernel, self.tiles, self.products, place


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A call of a layer's kernel for a group of output channels, without its inputs and outputs."""

    kernel: int
    # Int64, by `P`; those of inputs and outputs are 0.
    parameters: npt.NDArray[np.int64]
    first: int
    products: int
    # What the parameters point to.
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


def layer_calls(
    job: str, packed: PackedWeight, init: npt.NDArray[np.int32], output: Requantization | None
) -> list[LayerCall]:
    """A call for each group of output channels.

    Accumulators begin with `init`, int32 ``[padded outputs]``; `output` says how they become int8.
    """
    fused = None if output is None else (output.multiplier, output.limits(), output.singles())
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
        if fused is not None:
            multiplier, limits, singles = fused
            p[P.MULTIPLIER] = address(multiplier[group.first :])
            p[P.LIMITS], p[P.SINGLES] = address(limits), address(singles[group.first :])
        loop = kernel(packed.kind, job, packed.rows, group.vectors)
        products = packed.padded_inputs * group.vectors * LANES
        calls.append(LayerCall(loop.address, p, group.first, products, (packed, init, fused)))
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

    `tables` say which inputs meet which outputs; all tiles together multiply `seen` input rows.
    `inputs` and `out` are ``[rows, at least the padded channels]``, `out` int8 where `output` is
    given.
    """
    residual = None if output is None else output.residual
    added = None if residual is None else residual.rows
    return [
        call.on(tables, num_tiles, seen, inputs, out, added)
        for call in layer_calls(job, packed, init, output)
    ]


def run_calls(calls: Sequence[Call]) -> None:
    """Run all calls on all of torch's threads; they write disjoint places."""
    cut([[call.work(address(call.parameters)) for call in calls]]).run()


_PLACES = [int(P.INPUT), int(P.OUT), int(P.RESIDUAL)]
_NONE = -1  # the array of a residual that is not there


@dataclass(frozen=True, eq=False)
class RepeatedCalls:
    """Calls as a table of parameters, in which the places of some arrays are filled in."""

    # int64 ``[calls, parameters]``; of arrays, what their places are added to.
    table: npt.NDArray[np.int64]
    # ``[calls, 3]``: number of the array that a call reads, writes and adds.
    arrays: npt.NDArray[np.int64]
    # How many of the calls belong to each; a stage begins when the one before is done.
    stages: tuple[int, ...]
    # Address of the kernel, tiles and products of each call.
    works: tuple[tuple[int, int, int], ...]
    # What the parameters point to.
    held: tuple[Any, ...]
    _tasks: dict[int, Tasks] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        stages: Sequence[Sequence[Call]],
        inputs: npt.NDArray[Any],
        out: npt.NDArray[Any],
        added: npt.NDArray[Any] | None = None,
    ) -> RepeatedCalls:
        """Calls that were made for arrays which take the numbers 0 to 2, and are not needed."""
        calls = [call for stage in stages for call in stage]
        table = np.stack([call.parameters for call in calls])
        arrays = np.tile([0, 1, _NONE if added is None else 2], (len(calls), 1))
        # Relative to the arrays: `run` adds the addresses of the arrays of its call.
        table[:, _PLACES] -= [address(inputs), address(out), 0 if added is None else address(added)]
        works = tuple((call.kernel, call.tiles, call.products) for call in calls)
        sizes = tuple(len(stage) for stage in stages)
        return cls(table, arrays, sizes, works, tuple(call.held for call in calls))

    @classmethod
    def joined(cls, parts: Sequence[tuple[RepeatedCalls, Sequence[int]]]) -> RepeatedCalls:
        """One after the other, with the numbers that the arrays of each have among those of all."""
        numbers = [np.array([*given, _NONE])[part.arrays] for part, given in parts]
        return cls(
            np.concatenate([part.table for part, _ in parts]),
            np.concatenate(numbers),
            tuple(size for part, _ in parts for size in part.stages),
            tuple(work for part, _ in parts for work in part.works),
            tuple(part.held for part, _ in parts),
        )

    def run(self, places: Sequence[int]) -> None:
        """Make the calls on arrays of the same shapes and layouts, which lie at these addresses."""
        table = self.table.copy()  # the next call adds to the same relative places
        table[:, _PLACES] += np.array([*places, 0])[self.arrays]
        threads = torch.get_num_threads()
        tasks = self._tasks.get(threads)
        if tasks is None:
            tasks = self._tasks[threads] = self._cut()
        tasks.run(address(table))

    def _cut(self) -> Tasks:
        size = self.table.strides[0]
        works = [(*work, row * size) for row, work in enumerate(self.works)]
        ends = [0, *itertools.accumulate(self.stages)]
        return cut([works[first:stop] for first, stop in itertools.pairwise(ends)])
