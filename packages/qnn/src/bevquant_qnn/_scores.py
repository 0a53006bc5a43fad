"""Scores of a model's output: proxies that need no labels, or the caller's own metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_qnn._snapshots import float_tensors

Metric = Callable[[Any, Any], Any]
Reduce = Callable[[Sequence[Any]], float]

# Noise that float32 cannot tell from none: 20·log10(2^24).
_MOST_DB = 144.5


@dataclass(frozen=True)
class Score:
    """One number for a model, larger is better."""

    # Its name in the table.
    name: str
    # ``of_batch(output, float_output, batch)``: any small result.
    of_batch: Callable[[Any, Any, Any], Any]
    # Maps the results of all batches, in order, to the score.
    reduce: Reduce


def score_of(metric: str | Metric, reduce: Reduce | None) -> Score:
    """Return the score that `sensitivity` was asked for."""
    if callable(metric):
        name = getattr(metric, "__name__", type(metric).__name__)
        return Score(name, lambda out, _, batch: metric(out, batch), reduce or _mean)
    if reduce is not None:
        raise ValueError(f"sensitivity: reduce goes with a metric of your own, not with {metric!r}")
    if metric == "sqnr":
        return Score("sqnr", _powers, _decibel)
    if metric == "kl":
        return Score("kl", _divergence, _least_divergence)
    raise ValueError(f"sensitivity: unknown metric {metric!r}; use 'sqnr', 'kl' or a function")


def drawn_interval(results: Sequence[Any], reduce: Reduce) -> tuple[float, float] | None:
    """95 % interval of a score: its percentiles over 1,000 draws of batches with replacement.

    Returns:
        The ends; None for one batch.
    """
    count = len(results)
    if count < 2:
        return None
    drawn = np.random.default_rng(0).integers(count, size=(1000, count))
    low, high = np.percentile([reduce([results[i] for i in row]) for row in drawn], [2.5, 97.5])
    return float(low), float(high)


def _mean(values: Sequence[Any]) -> float:
    """The mean of a metric's results over the batches."""
    return math.fsum(float(value) for value in values) / len(values)


def loss_of(name: str) -> Callable[[float, float], float]:
    """Loss of a score of that name, in a unit that adds up."""
    return _noise if name == "sqnr" else _difference


def score_after(name: str, loss: float, of_float: float) -> float:
    """The score of that name after a loss: `loss_of` the other way round."""
    if name != "sqnr":
        return of_float - loss
    return -10 * math.log10(loss + 10 ** (-of_float / 10))


def _difference(score: float, of_float: float) -> float:
    return of_float - score


def _noise(score: float, of_float: float) -> float:
    """Noise over signal: independent noises add up, decibels do not."""
    return 10 ** (-score / 10) - 10 ** (-of_float / 10)


def _pairs(output: Any, reference: Any) -> list[tuple[Tensor, Tensor]]:
    """Outputs of a trial and of the float model."""
    pairs = list(zip(floats_of(output), floats_of(reference), strict=True))
    for q, f in pairs:
        if q.shape != f.shape:
            raise ValueError(
                f"sensitivity: an output has shape {tuple(f.shape)} in float and {tuple(q.shape)} "
                "quantized: values decide which rows remain, so that rows cannot be compared; "
                "name modules before that selection in outputs, or give a metric of your own"
            )
    return pairs


def _powers(output: Any, reference: Any, batch: Any) -> tuple[float, float]:
    pairs = _pairs(output, reference)
    signal = math.fsum(float(f.double().square().sum()) for _, f in pairs)
    noise = math.fsum(float((q.double() - f.double()).square().sum()) for q, f in pairs)
    return signal, noise


def _decibel(powers: Sequence[tuple[float, float]]) -> float:
    signal, noise = math.fsum(s for s, _ in powers), math.fsum(n for _, n in powers)
    if noise == 0:
        return _MOST_DB
    if signal == 0:
        return -_MOST_DB
    return max(-_MOST_DB, min(_MOST_DB, 10 * math.log10(signal / noise)))


def _divergence(output: Any, reference: Any, batch: Any) -> tuple[float, int]:
    total, count = [], 0
    for q, f in _pairs(output, reference):
        axis = 1 if f.dim() > 1 else 0
        p, log_q = f.double().log_softmax(axis), q.double().log_softmax(axis)
        total.append(float((p.exp() * (p - log_q)).sum()))
        count += f.numel() // f.shape[axis]
    return math.fsum(total), count


def _least_divergence(parts: Sequence[tuple[float, int]]) -> float:
    return 0.0 - math.fsum(total for total, _ in parts) / max(1, sum(count for _, count in parts))


def floats_of(value: Any) -> list[Tensor]:
    """The floating-point tensors of an output."""
    found = float_tensors(value)
    if not found:
        raise ValueError(
            "sensitivity: the output holds no floating-point tensor; name modules in outputs, or "
            "give a metric of your own"
        )
    for tensor in found:
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                "sensitivity: the output holds NaN or infinite values; check the ranges "
                "(bevquant_quantizers.uncalibrated) and the batches"
            )
    return found
