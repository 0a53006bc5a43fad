"""How far rounding may move what functions of floats compute, found by rounding at random."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from bevquant_export.dense._graph import Array
from bevquant_export.dense._source import Program, Ref, Step, replaced

_RUNS = 6
_UNITS = 2  # a function's own steps each round
_DEVIATIONS = 4.0


class FloatErrors:
    r"""Runs functions of floats with every operand and every result rounded at random.

    A softmax, a norm, an attention or a sum loses digits where its terms cancel, and no formula
    knows all of them. Stochastic arithmetic does (J. Vignes, A stochastic arithmetic for reliable
    scientific computation, 1993): each float x that a function reads or makes becomes

    .. math:: x\,(1 + 2 u r), \quad r \text{ uniform in } [-1, 1)

    with u = 2⁻¹¹ in half precision and 2⁻²⁴ else, six times over, constants and what follows
    behind alike. The error is four times the root mean square of what that moves. Integers, and
    what layers make of them, stand still before they are rounded so: each piece of a file is given
    them. The numbers are the same in every run.

    Args:
        program: Whose steps `see` is shown.
        wanted: Values whose errors are asked for; those of integers are zero.
        half: Whether the file's floats are half precision.

    Attributes:
        values: Of `wanted`, as the program has them.
        errors: Of `wanted`, float64, of the same shape.
    """

    def __init__(self, program: Program, wanted: Collection[str], *, half: bool) -> None:
        self._unit = _UNITS * (2.0**-11 if half else 2.0**-24)
        needed, self._wanted = set(wanted), set(wanted)
        self._last: dict[str, str] = {}  # what is read to the result of its last reader
        self._calls: set[str] = set()
        for step in reversed(program.steps):
            if needed.intersection(step.outputs) and _is_call(step):
                self._calls.add(step.outputs[0])
                needed.update(step.inputs)
                for name in step.inputs:
                    self._last.setdefault(name, step.outputs[0])
        self._runs: dict[str, list[Any]] = {}
        self._random = torch.Generator().manual_seed(0)
        self.values: dict[str, Array] = {}
        self.errors: dict[str, Array] = {}

    def hold(self, values: Iterable[tuple[str, Any]]) -> None:
        """Take inputs of the program."""
        for name, value in values:
            self._take(name, value, [value] * _RUNS)

    def see(self, step: Step, given: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        """Take what a step of the program made, and let the runs make it too."""
        runs = self._called(step) if step.outputs[0] in self._calls else [made] * _RUNS
        for name, value, *each in zip(step.outputs, made, *runs, strict=False):
            self._take(name, value, each)
        for name in step.inputs:
            if self._last.get(name) == step.outputs[0]:
                self._runs.pop(name, None)

    def _take(self, name: str, value: Any, runs: list[Any]) -> None:
        if name in self._last:
            self._runs[name] = runs
        if name in self._wanted and all(_alike(run, value) for run in runs):
            squares = torch.stack([(run.double() - value).square() for run in runs])
            self.values[name] = value.cpu().numpy()
            self.errors[name] = (_DEVIATIONS * squares.mean(0).sqrt()).cpu().numpy()

    def _called(self, step: Step) -> list[tuple[Any, ...]]:
        """What a step makes in each of the runs."""
        call: Any = step.module if step.function is None else step.function
        rounded = self._rounded if step.op == "float" else (lambda value: value)
        made = []
        for run in range(_RUNS):
            args, kwargs = replaced(
                (step.args, dict(step.kwargs)), lambda ref, i=run: rounded(self._runs[ref.name][i])
            )
            result = rounded(call(*args, **kwargs))
            made.append((result,) if len(step.outputs) == 1 else tuple(result))
        return made

    def _rounded(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)([self._rounded(item) for item in value])
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        noise = torch.rand(value.shape, generator=self._random).to(value.device)
        return value * (1 + self._unit * (2 * noise - 1))


def _is_call(step: Step) -> bool:
    refs: list[Any] = []
    replaced((step.args, dict(step.kwargs)), refs.append)
    called = step.function is not None or step.module is not None
    return step.op in ("float", "move") and called and all(isinstance(ref, Ref) for ref in refs)


def _alike(run: Any, value: Any) -> bool:
    return isinstance(run, Tensor) and isinstance(value, Tensor) and run.shape == value.shape
