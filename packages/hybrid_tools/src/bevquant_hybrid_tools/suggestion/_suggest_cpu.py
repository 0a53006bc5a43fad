"""Which BPU layers should move to the CPU, from measured sensitivity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from bevquant_hybrid.march import require_march
from bevquant_hybrid.partition.trials import measured_form, rounding_off
from bevquant_hybrid_tools.performance import ChipFigures

from ._greedy import Limits, Search, first_arguments
from ._measure import Forward, Measure, Metric, output_sqnr
from ._suggestion import CpuSuggestion

__all__ = ["suggest_cpu"]


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
    """Propose which BPU layers should run on the CPU, by what each of them costs in accuracy.

    The model rounds with the ranges that it has, and is held against its float form, all fake
    quantizers off. Each candidate is measured as `prepare_qat_fx` with that `hybrid_dict` would
    make the model: the layer's weight is a float, its input is dequantized, and its output is
    quantized for readers on the BPU alone. Candidates are the layers that run on the BPU, one by
    one, and a layer together with all BPU readers of its output, since only then the value between
    them is a float. The one that gains most per millisecond is picked (one that adds no time comes
    before all others), then the others are measured again behind it, until none gains, or none
    fits the budget. What keeps the scale of its input (pooling by maximum, resizing, ReLU) has no
    range of its own and moves only where none of its readers stays on the BPU.

    It takes (picks + 1) · candidates · batches runs of the model, and the memory of one copy of it
    and of the float outputs of all batches. The model stays as it is.

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
