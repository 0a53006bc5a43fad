"""Kernel calls that are made again and again on other memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bevquant_int8sim._compiled.launch import Call
from bevquant_int8sim._compiled.parameters import P
from bevquant_int8sim._compiled.threads import share
from bevquant_int8sim._tile_output import Requantization

__all__ = ["RepeatedCalls"]

_TASK_PRODUCTS = 50_000_000  # 0.1 ms with VNNI: a late thread then costs little
_WORTH_SHARING = 4_000_000  # products below which another thread costs more than it brings


class RepeatedCalls:
    """Calls that write disjoint places, as a table of parameters in which two addresses change.

    Args:
        calls: The calls, made for `inputs` and `out`, whose memory is not needed afterwards.
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
        self._shapes = [(call.run, call.tiles, call.products) for call in calls]
        self._products = sum(call.products for call in calls)
        self._held = [tuple(_without(call.held, inputs, out)) for call in calls]
        self._tasks: dict[int, list[tuple[Any, int, int, int]]] = {}

    def run(
        self,
        inputs: npt.NDArray[Any],
        out: npt.NDArray[Any],
        added: npt.NDArray[Any] | None = None,
    ) -> None:
        """Make the calls on arrays of the same shape and layout."""
        table = self._table.copy()
        table[:, P.INPUT] += inputs.ctypes.data
        table[:, P.OUT] += out.ctypes.data
        if added is not None:
            table[:, P.RESIDUAL] += added.ctypes.data
        address = table.ctypes.data
        threads = torch.get_num_threads() if self._products > _WORTH_SHARING else 1
        tasks = self._tasks.get(threads)
        if tasks is None:
            tasks = self._tasks[threads] = self._cut(threads)

        def task(number: int) -> None:
            run, first, stop, row = tasks[number]
            run(first, stop, address + row)

        if threads > 1:
            share(task, len(tasks))
        else:
            for number in range(len(tasks)):
                task(number)

    def _cut(self, threads: int) -> list[tuple[Any, int, int, int]]:
        """(kernel, first tile, last tile + 1, bytes from the table's start) of each task."""
        size = max(1, self._products)
        if threads > 1:
            size = max(1, min(_TASK_PRODUCTS, self._products // (4 * threads)))
        tasks = []
        for number, (run, tiles, products) in enumerate(self._shapes):
            parts = max(1, min(tiles, -(-products // size)))
            row = number * self._table.strides[0]
            for part in range(parts):
                tasks.append((run, tiles * part // parts, tiles * (part + 1) // parts, row))
        return tasks


def _without(held: Any, *arrays: npt.NDArray[Any]) -> list[Any]:
    """What calls need, but for these arrays' memory."""

    def shares(value: Any) -> bool:
        return isinstance(value, np.ndarray) and any(
            np.may_share_memory(value, array) for array in arrays
        )

    kept = [v.multiplier if isinstance(v, Requantization) else v for v in held]
    return [value for value in kept if not shares(value)]
