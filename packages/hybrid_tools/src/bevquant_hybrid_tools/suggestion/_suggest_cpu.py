"""Greedy selection of BPU layers to move to the CPU, by gain per millisecond."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, fx, nn

from bevquant_hybrid.march import require_march
from bevquant_hybrid.partition.trials import NoScaleError, Trials, measured_form, rounding_off
from bevquant_hybrid.undisturbed import positional
from bevquant_hybrid_tools.performance import ChipFigures
from bevquant_hybrid_tools.suggestion._suggestion import (
    CpuMove,
    CpuSuggestion,
    Forward,
    Measured,
    Metric,
    Metrics,
    call_model,
    estimate_cost,
    output_sqnr,
)


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
        model: From `prepare_calibration_fx`, calibrated, or from `prepare_qat_fx`; hybrid or not. A
            model that is not hybrid becomes so: layers that must run on the CPU are in every
            measurement.
        batches: Inputs of `forward`: tensors, tuples or lists of arguments, dicts of keywords. They
            are kept in a list.
        budget: Milliseconds that all moves together may add; None for any.
        layers: How many layers may move; None for any. One of both must be given.
        metric: ``metric(model_output, float_output)``, larger is better; its mean over the batches
            counts. Both come without `QTensor`. By default the signal-to-noise ratio of the outputs
            in dB: the mean over output tensors of 10·log₁₀(Σf²/Σ(f − q)²), within ±144.5 dB.
        forward: Called as ``forward(model, batch)``; by default a tuple or list is spread over the
            arguments, a dict over the keywords, anything else is the only argument.
        hybrid_dict: The `hybrid_dict` of the preparation. By default it is read from the model;
            that fails only where it names modules for the functions in their forward.
        qconfig_dict: For a calibrated model, the argument of `prepare_qat_fx` to come; by default
            `get_default_qat_qconfig` in the calibrated types.
        min_gain: A layer moves if it gains more than this; by default 0.1 dB, or 0 with a metric
            of your own.
        example_inputs: For which the time is estimated: a tensor, a tuple or list of arguments or a
            dict of keywords; by default the first batch.
        figures: Of another chip than the march's.

    Returns:
        The suggestion: a table when printed, and a `hybrid_dict`. Pass the dict to
        `prepare_calibration_fx` and calibrate again before `prepare_qat_fx`: the ranges of values
        that cross a new boundary have other names. Its times are estimates by
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
    _expect_above_zero("budget", budget)
    _expect_above_zero("layers", layers)
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
    arguments = _first_arguments(given, listed[0], forward, example_inputs)
    with rounding_off(given):
        metric_of = Metrics(given, listed, forward, metric or output_sqnr)

    def measure(placed: fx.GraphModule, what: str) -> Measured:
        cost = estimate_cost(placed, arguments, march, figures)
        return Measured(metric_of(placed, what), *cost)

    rows, start = _Search(trials, kept, measure, budget, layers, least).run()
    name = "SQNR (dB)" if metric is None else getattr(metric, "__name__", type(metric).__name__)
    as_given = metric_of(given, "the model as given")
    return CpuSuggestion(march, name, as_given, start.metric, start.milliseconds, kept, rows)


def _expect_above_zero(name: str, value: Any) -> None:
    if value is None:
        return
    good = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if not good or math.isnan(value) or (name == "layers" and value != int(value)):
        expected = "a whole number of layers" if name == "layers" else "milliseconds"
        raise ValueError(f"suggest_cpu: {name}={value!r}; expected {expected} above 0")


_Names = tuple[str, ...]


class _Search:
    """Greedy search over moves to the CPU; `measure` gets a name of the model for errors."""

    def __init__(
        self,
        trials: Trials,
        kept: _Names,
        measure: Callable[[fx.GraphModule, str], Measured],
        budget: float | None,
        layers: int | None,
        min_gain: float,
    ) -> None:
        self._trials, self._kept, self._measure = trials, kept, measure
        self._budget, self._layers, self._min_gain = budget, layers, min_gain
        self._known: dict[frozenset[str], Measured | None] = {}

    def run(self) -> tuple[tuple[CpuMove, ...], Measured]:
        """The rows, and the model before any move."""
        model = self._trials.build(self._kept).model
        start = now = self._measure(model, "the hybrid model")
        picked: _Names = ()
        rows: list[CpuMove] = []
        while True:
            moves = self._trials.build((*self._kept, *picked)).moves()
            found = [(names, self._of((*picked, *names))) for names in moves]
            behind = {names: there for names, there in found if there}
            gains = {names: there.metric - now.metric for names, there in behind.items()}
            gaining = [names for names in gains if gains[names] > self._min_gain]
            fitting = [n for n in gaining if not self._beyond(start, picked, n, behind[n])]
            if not fitting:
                return (*rows, *self._staying(start, picked, behind, gains)), start
            # max takes the first of equals: the graph's order decides.
            best = max(fitting, key=lambda names: _rank(gains[names], now, behind[names]))
            reason = f"gains {gains[best]:.2f}, most per ms of {len(gaining)}"
            if len(best) > 1:
                alone = [f"{name} {gains[name,]:+.2f}" for name in best if (name,) in gains]
                reason += (
                    f"; the value between is a float then (alone {', '.join(alone) or 'none'})"
                )
            there, single = behind[best], self._of(best)
            gain = gains[best] if single is None else single.metric - start.metric
            rows.append(_move(best, gain, there.metric, now, there, reason))
            now, picked = there, (*picked, *best)

    def _of(self, moved: _Names) -> Measured | None:
        """Measure a placement once; None where a value has no range."""
        # Placements of one round come back in the next, in another order of picks.
        key = frozenset(moved)
        if key not in self._known:
            try:
                model = self._trials.build((*self._kept, *moved)).model
            except NoScaleError:
                self._known[key] = None
            else:
                what = f"the model with {', '.join(moved)} on the CPU"
                self._known[key] = self._measure(model, what)
        return self._known[key]

    def _beyond(self, start: Measured, picked: _Names, names: _Names, there: Measured) -> str:
        """The limit that a move would exceed, if any."""
        if self._layers is not None and len(picked) + len(names) > self._layers:
            return f"no more than {self._layers} layers may move"
        if self._budget is not None and there.milliseconds - start.milliseconds > self._budget:
            return f"adds more than {self._budget:g} ms"
        return ""

    def _staying(
        self,
        start: Measured,
        picked: _Names,
        behind: dict[_Names, Measured],
        gains: dict[_Names, float],
    ) -> list[CpuMove]:
        """Rows of the layers that stay, the largest gain first."""
        rows = []
        for names, there in behind.items():
            alone, gain = self._of(names), gains[names]
            idle = gain <= self._min_gain
            # Members of a group that gains nothing have rows of their own.
            if alone is None or (len(names) > 1 and idle):
                continue
            reason = f"gains {gain:.2f}, but {self._beyond(start, picked, names, there)}"
            if idle:
                reason = "gains nothing" if not picked else "gains nothing behind what moves"
            rows.append(_move(names, alone.metric - start.metric, None, start, alone, reason))
        return sorted(rows, key=lambda row: -row.gain_alone)


def _rank(gain: float, now: Measured, there: Measured) -> tuple[float, float]:
    added = there.milliseconds - now.milliseconds
    # A move that costs no time goes first; among those the larger gain decides.
    return (gain / added if added > 0 else math.inf, gain)


def _move(
    names: _Names, gain: float, metric: float | None, before: Measured, after: Measured, reason: str
) -> CpuMove:
    added = after.milliseconds - before.milliseconds
    transfer = after.transfer_bytes - before.transfer_bytes
    return CpuMove(names[0], names[1:], gain, metric, added, transfer, reason)


def _first_arguments(
    model: fx.GraphModule, batch: Any, forward: Forward | None, example_inputs: Any
) -> tuple[Any, ...]:
    """The arguments of the model's own forward on a batch, or the examples in their order."""
    if example_inputs is not None:
        return positional(model, example_inputs)
    seen: list[tuple[Any, ...]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        seen.append(bound.args)

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        call_model(model, batch, forward)
    finally:
        handle.remove()
    if not seen:
        raise ValueError("suggest_cpu: forward did not call the model; it must run it on the batch")
    return seen[0]
