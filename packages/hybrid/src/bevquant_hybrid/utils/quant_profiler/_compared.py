"""One operator's results in two forms of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import layer_class
from bevquant_hybrid.qtensor import QTensor, as_float
from bevquant_hybrid.utils.quant_profiler._align import Match
from bevquant_hybrid.utils.quant_profiler._calls import Call, tensors_in
from bevquant_hybrid.utils.quant_profiler._features import scale_of
from bevquant_hybrid.utils.quant_profiler._measures import Measure
from bevquant_hybrid.utils.quant_profiler._replay import replay

__all__ = ["compare"]


def compare(match: Match, measure: Measure, swapped: bool) -> list[Any] | None:
    """Compare the results of matched calls.

    Args:
        match: The calls.
        measure: Of the similarity.
        swapped: Whether `match.one` is of the first model, else of the second.

    Returns:
        Name, class in the first model, similarity, scale, largest difference, the same in steps,
        and in steps where both are given the same; None where the results have other shapes.
    """
    one, like, last = match.one, match.like, match.last
    first, second = (one, last) if swapped else (last, one)
    pairs = _pairs(first.output, second.output)
    if pairs is None:
        return None
    x, y = (torch.cat([_values(pair[i]) for pair in pairs]) for i in (0, 1))
    scale = next((s for pair in pairs for t in pair[::-1] if (s := scale_of(t)) is not None), None)
    identities = [layer_class(call.module, nn.Identity) is not None for call in (one, like)]
    again = None
    if identities[0] == identities[1]:
        again = _pairs(last.output, replay(one, match.inputs))
    name = one.path + ("(I vs I)" if all(identities) else "(I)" if any(identities) else "")
    return [
        name + (f"({one.repeat})" if one.repeat else ""),
        type(one.module if swapped else like.module),
        measure(x, y),
        scale.item() if scale is not None and scale.numel() == 1 else None,
        float((x - y).abs().max()) if x.numel() else 0.0,
        _steps(pairs, one),
        None if again is None else _steps(again, one),
    ]


def _pairs(first: Any, second: Any) -> list[tuple[Tensor, Tensor]] | None:
    """Tensors of two results side by side; None where they do not fit."""
    ones, others = list(tensors_in(first)), list(tensors_in(second))
    fits = [tuple(t.shape) for t in ones] == [tuple(t.shape) for t in others]
    return list(zip(ones, others, strict=True)) if ones and fits else None


def _values(tensor: Tensor) -> Tensor:
    return as_float(tensor).detach().cpu().double().reshape(-1)


def _steps(pairs: list[tuple[Tensor, Tensor]], call: Call) -> int | None:
    """The largest difference in steps of the results' scale; of what is dequantized, its input's.

    None without a scale of 8 or 16 bits (those of accumulators say nothing), unless there is no
    difference.
    """
    largest = 0.0
    for pair in pairs:
        difference = (_values(pair[0]) - _values(pair[1])).abs()
        if difference.numel() == 0 or not bool(difference.any()):
            continue
        candidates = (*pair[::-1], *tensors_in(call.args))
        steps = next((s for t in candidates if (s := _step(t, pair[0])) is not None), None)
        if steps is None or not bool(difference.isfinite().all()):
            return None
        largest = max(largest, float((difference / steps).max()))
    return round(largest)


def _step(tensor: Tensor, like: Tensor) -> Tensor | None:
    """One step of every value of a quantized tensor of the same shape as another."""
    if not isinstance(tensor, QTensor) or tensor.dtype == "qint32":
        return None
    if scale_of(tensor) is None or tensor.shape != like.shape:
        return None
    return tensor.scale_of_each().detach().cpu().double().reshape(-1)
