"""Pick the move that gains most per millisecond, measure all others again, and so on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from bevquant_hybrid.partition.trials import NoScaleError, Trials
from bevquant_hybrid_tools.performance import ChipFigures

from ._measure import Cost, Forward, Measure, call_model, estimate_cost, positional
from ._suggestion import CpuMove

__all__ = ["Limits", "Measured", "Search", "first_arguments"]

Names = tuple[str, ...]


@dataclass(frozen=True)
class Limits:
    """When to stop.

    Attributes:
        milliseconds: That all moves may add; None for any.
        layers: That may move; None for any.
        min_gain: That a move must exceed.
    """

    milliseconds: float | None
    layers: int | None
    min_gain: float

    def allow(self, layers: int, milliseconds: float) -> bool:
        """Whether so many layers may move, adding so much time."""
        few = self.layers is None or layers <= self.layers
        return few and (self.milliseconds is None or milliseconds <= self.milliseconds)


@dataclass(frozen=True)
class Measured:
    """How well a placement computes, and what it costs."""

    metric: float
    cost: Cost


class Search:
    """Greedy search over moves to the CPU.

    Args:
        trials: Builds the models.
        kept: Names that are on the CPU whatever happens.
        measure: The metric.
        arguments: Of a run whose time is estimated.
        march: Of the board.
        figures: Of another chip; None for the march's.
        limits: When to stop.
    """

    def __init__(
        self,
        trials: Trials,
        kept: Names,
        measure: Measure,
        arguments: tuple[Any, ...],
        march: str,
        figures: ChipFigures | None,
        limits: Limits,
    ) -> None:
        self._trials, self._kept, self._measure = trials, kept, measure
        self._arguments, self._march, self._figures = arguments, march, figures
        self._limits = limits
        self._known: dict[frozenset[str], Measured | None] = {}

    def run(self) -> tuple[tuple[CpuMove, ...], Measured]:
        """The rows, and the model before any move."""
        start = now = self._measured(self._trials.build(self._kept).model, "the hybrid model")
        picked: Names = ()
        rows: list[CpuMove] = []
        while True:
            moves = self._trials.build((*self._kept, *picked)).moves()
            found = [(names, self._of((*picked, *names))) for names in moves]
            behind = {names: there for names, there in found if there}
            gaining = [n for n in behind if behind[n].metric - now.metric > self._limits.min_gain]
            fitting = [n for n in gaining if self._fits(start, picked, n, behind[n])]
            if not fitting:
                return (*rows, *self._stay(start, now, picked, behind)), start
            # max takes the first of equals: the graph's order decides.
            best = max(fitting, key=lambda n: _rank(now, behind[n]))
            rows.append(self._row(start, now, best, behind, len(gaining)))
            now, picked = behind[best], (*picked, *best)

    def _of(self, moved: Names) -> Measured | None:
        """Measure a placement once; None where a value has no range."""
        key = frozenset(moved)
        if key not in self._known:
            try:
                trial = self._trials.build((*self._kept, *moved))
            except NoScaleError:
                self._known[key] = None
                return None
            what = f"the model with {', '.join(moved)} on the CPU"
            self._known[key] = self._measured(trial.model, what)
        return self._known[key]

    def _measured(self, model: fx.GraphModule, what: str) -> Measured:
        metric = self._measure.of(model, what)
        return Measured(metric, estimate_cost(model, self._arguments, self._march, self._figures))

    def _fits(self, start: Measured, picked: Names, names: Names, there: Measured) -> bool:
        added = there.cost.milliseconds - start.cost.milliseconds
        return self._limits.allow(len(picked) + len(names), added)

    def _row(
        self,
        start: Measured,
        now: Measured,
        names: Names,
        behind: dict[Names, Measured],
        gaining: int,
    ) -> CpuMove:
        alone, there = self._of(names), behind[names]
        reason = f"gains {there.metric - now.metric:.2f}, most per ms of {gaining}"
        if len(names) > 1:
            single = {name: behind[(name,)] for name in names if (name,) in behind}
            gains = [f"{name} {one.metric - now.metric:+.2f}" for name, one in single.items()]
            reason += f"; the value between is a float then (alone {', '.join(gains) or 'none'})"
        gain = there.metric - now.metric if alone is None else alone.metric - start.metric
        return _move(names, gain, there.metric, now, there, reason)

    def _stay(
        self, start: Measured, now: Measured, picked: Names, behind: dict[Names, Measured]
    ) -> list[CpuMove]:
        rows = []
        for names, there in behind.items():
            alone = self._of(names)
            if alone is None:
                continue
            gain, here = alone.metric - start.metric, there.metric - now.metric
            if len(names) > 1 and here <= self._limits.min_gain:
                continue
            if here <= self._limits.min_gain:
                reason = "gains nothing" if not picked else "gains nothing behind what moves"
            elif self._limits.layers is not None and len(picked) + len(names) > self._limits.layers:
                reason = f"gains {here:.2f}, but no more than {self._limits.layers} layers may move"
            else:
                reason = f"gains {here:.2f}, but adds more than {self._limits.milliseconds:g} ms"
            rows.append(_move(names, gain, None, start, alone, reason))
        return sorted(rows, key=lambda row: -row.gain_alone)


def _rank(now: Measured, there: Measured) -> tuple[float, float]:
    gain = there.metric - now.metric
    added = there.cost.milliseconds - now.cost.milliseconds
    return (gain / added if added > 0 else math.inf, gain)


def _move(
    names: Names, gain: float, metric: float | None, before: Measured, after: Measured, reason: str
) -> CpuMove:
    return CpuMove(
        *(names[0], names[1:], gain, metric),
        milliseconds=after.cost.milliseconds - before.cost.milliseconds,
        transfer_bytes=after.cost.transfer_bytes - before.cost.transfer_bytes,
        reason=reason,
    )


def first_arguments(
    model: fx.GraphModule, batch: Any, forward: Forward | None, example_inputs: Any
) -> tuple[Any, ...]:
    """The arguments of the model's own forward on a batch, or the examples in their order."""
    if isinstance(example_inputs, dict):
        return positional(model.graph, (), example_inputs)
    if example_inputs is not None:
        many = isinstance(example_inputs, tuple | list)
        return tuple(example_inputs) if many else (example_inputs,)
    seen: list[tuple[Any, ...]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(positional(model.graph, args, kwargs))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        call_model(model, batch, forward)
    finally:
        handle.remove()
    if not seen:
        raise ValueError("suggest_cpu: forward did not call the model; it must run it on the batch")
    return seen[0]
