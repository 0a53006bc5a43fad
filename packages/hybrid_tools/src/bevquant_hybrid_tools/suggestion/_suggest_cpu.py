"""Greedy selection of BPU layers to move to the CPU, by gain per millisecond."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from bevquant_hybrid.march import require_march
from bevquant_hybrid.partition.trials import NoScaleError, Trials, measured_form, rounding_off
from bevquant_hybrid_tools.performance import ChipFigures
from bevquant_hybrid_tools.suggestion._suggestion import (
    Cost,
    Forward,
    Measure,
    Metric,
    call_model,
    estimate_cost,
    output_sqnr,
    positional,
)

from ._suggestion import CpuMove, CpuSuggestion


def suggest_cpu(
    model: nn.Module,
    batches: Iterable[Any],
    budget: float | None = None,
    *,
    layers: int | None = None,
    metric: Metric | None = None,
    forward: Forward | None = None,
    hybrid_dict: Mapping[str, Iterable[Any]] | None = None,
    qconfig_dict: dict[str, Any] | None = None,
    min_gain: float | None = None,
    example_inputs: Any = None,
    figures: ChipFigures | None = None,
) -> CpuSuggestion:
    """Suggest BPU layers to run on the CPU, by the accuracy cost of each.

    The model rounds with its current ranges and is compared with its float form, all fake
    quantizers off. Each candidate is measured as the model from `prepare_qat_fx` with that
    `hybrid_dict`: the layer's weight is float, its input is dequantized, and its output is
    quantized only for BPU consumers. Candidates are the layers that run on the BPU, one by one, and
    a layer together with all BPU readers of its output, since only then the value between them is a
    float. The candidate with the largest gain per millisecond is picked (candidates without added
    time first). The others are then measured again, until none gains or fits the budget. Operators
    that keep the scale of their input (max pooling, resizing, ReLU) have no range and move only if
    no consumer stays on the BPU.

    It takes (picks + 1) · candidates · batches runs of the model, and the memory of one copy of it
    and of the float outputs of all batches. The model is not changed.

    Args:
        model: From `prepare_calibration_fx`, calibrated, or from `prepare_qat_fx`; hybrid or not.
            One that is not becomes hybrid: what must run on the CPU then is in every measurement.
        batches: What `forward` takes one by one: tensors, tuples or lists of arguments, dicts of
            keywords. They are kept in a list.
        budget: Milliseconds that all moves together may add; None for any.
        layers: How many layers may move; None for any. One of both must be given.
        metric: ``metric(model_output, float_output)``, larger is better; its mean over the batches
            counts. Both come without `QTensor`. By default the signal-to-noise ratio of the outputs
            in dB: the mean over output tensors of 10·log₁₀(Σf²/Σ(f − q)²), within ±144.5 dB.
        forward: Called as ``forward(model, batch)``; by default a tuple or list is spread over the
            arguments, a dict over the keywords, anything else is the only argument.
        hybrid_dict: What the model was prepared with. It can be told from the model itself, unless
            it names modules for the functions in their forward.
        qconfig_dict: Of a calibrated model, what `prepare_qat_fx` will get; by default
            `get_default_qat_qconfig` in the types that were calibrated.
        min_gain: A layer moves if it gains more than this; by default 0.1 dB, or 0 with a metric
            of your own.
        example_inputs: For which the time is estimated: a tensor, a tuple or list of arguments or a
            dict of keywords; by default the first batch.
        figures: Of another chip than the march's.

    Returns:
        The suggestion: a table when printed, and a `hybrid_dict`. Give that to
        `prepare_calibration_fx` and run the batches again before `prepare_qat_fx` gets it: values
        that cross a boundary now have their ranges under other names. Its times are estimates by
        roofline: CPU at the peak of all its cores, BPU at the peak of one, every layer and every
        stub between them reading and writing DDR memory, one after the other.

    Raises:
        RuntimeError: No march is set.
        TypeError: The model is not prepared, or converted already.
        ValueError: Ranges are missing, nothing runs on the BPU, there are no batches, the budget
            is not above 0, or a metric is not finite.

    Example:
        >>> import torch
        >>> from bevquant_hybrid.march import March, set_march
        >>> from bevquant_hybrid.quantization import (
        ...     QuantStub, get_default_calib_qconfig, prepare_calibration_fx
        ... )
        >>> set_march(March.BAYES)
        >>> float_model = nn.Sequential(QuantStub(), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 1, 1))
        >>> with torch.no_grad():  # one input outweighs the other a thousandfold
        ...     float_model[1].weight[:, 0] *= 1000
        ...     _ = float_model[2].weight.fill_(0.5)
        >>> model = prepare_calibration_fx(float_model.eval(), {"": get_default_calib_qconfig()})
        >>> batch = torch.linspace(-1, 1, 32).reshape(1, 2, 4, 4)
        >>> _ = model(batch)
        >>> suggestion = suggest_cpu(model, [batch], layers=1)
        >>> len(suggestion.moves), suggestion.metric > suggestion.start
        (1, True)
    """
    least = (0.1 if metric is None else 0.0) if min_gain is None else float(min_gain)
    limits = Limits(_above_zero("budget", budget), _above_zero("layers", layers), least)
    if budget is None and layers is None:
        raise ValueError(
            "suggest_cpu: give a budget: milliseconds (budget=0.5), a number of layers (layers=3), "
            "or both"
        )
    march = require_march("suggest_cpu")
    given, trials, kept = measured_form(model, march, hybrid_dict, qconfig_dict)
    if not trials.build(kept).moves():
        raise ValueError(
            "suggest_cpu: no layer runs on the BPU, so none can move; look at "
            "bevquant_hybrid.partition.partition for where everything runs, and why"
        )
    if isinstance(batches, Tensor | Mapping):
        raise TypeError(
            f"suggest_cpu: batches is one {type(batches).__name__}; pass a list of batches: [batch]"
        )
    listed = list(batches)
    if not listed:
        raise ValueError("suggest_cpu: there are no batches; pass at least one, as for calibration")
    arguments = first_arguments(given, listed[0], forward, example_inputs)
    with rounding_off(given):
        measure = Measure(given, listed, forward, metric or output_sqnr)
    search = Search(trials, kept, measure, arguments, march, figures, limits)
    name = "SQNR (dB)" if metric is None else getattr(metric, "__name__", type(metric).__name__)
    rows, start = search.run()
    return CpuSuggestion(
        *(march, name, measure.of(given, "the model as given"), start.metric),
        *(start.cost.milliseconds, kept, rows),
    )


def _above_zero(name: str, value: Any) -> Any:
    if value is None:
        return None
    good = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if not good or math.isnan(value) or (name == "layers" and value != int(value)):
        expected = "a whole number of layers" if name == "layers" else "milliseconds"
        raise ValueError(f"suggest_cpu: {name}={value!r}; expected {expected} above 0")
    return value


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
