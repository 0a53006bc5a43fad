"""Kernel calls that are made again and again on other memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bevquant_int8sim._compiled.launch import Call, threads_for
from bevquant_int8sim._compiled.parameters import P
from bevquant_int8sim._compiled.tasks import Tasks, cut, run_tasks
from bevquant_int8sim._tile_output import Requantization


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
