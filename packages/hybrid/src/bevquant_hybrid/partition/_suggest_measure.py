"""How far a quantized model is from its float form, on batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid.nn.qat.stubs import DeQuantStub

__all__ = ["Forward", "Measure", "Metric", "call_model", "output_sqnr"]

Metric = Callable[[Any, Any], float]
Forward = Callable[[nn.Module, Any], Any]

_MOST = 20 * math.log10(2**24)  # what float32 itself resolves, in dB


def output_sqnr(output: Any, float_output: Any) -> float:
    r"""Signal to quantization noise in dB: :math:`10 \log_{10}(\sum f^2 / \sum (f - q)^2)`.

    Of several output tensors it is the mean of theirs, so that a small one counts as much as a
    large one. Nothing is better than 144.5 dB, the resolution of float32, or worse than its
    negative.

    Args:
        output: What the quantized model gave: a tensor, or lists, tuples and dicts of them.
        float_output: What its float form gave, of the same build.

    Raises:
        ValueError: There is no float tensor in it.

    Example:
        >>> round(output_sqnr(torch.tensor([0.9]), torch.tensor([1.0])), 1)
        20.0
    """
    found = []
    for q, f in zip(_tensors(output), _tensors(float_output), strict=True):
        wanted, got = f.detach().double(), q.detach().double()
        signal, noise = float(wanted.square().sum()), float((wanted - got).square().sum())
        if math.isnan(noise) or math.isinf(signal):
            return math.nan
        if noise == 0 or signal == 0:
            found.append(_MOST if noise == 0 else -_MOST)
        else:
            found.append(max(-_MOST, min(_MOST, 10 * math.log10(signal / noise))))
    if not found:
        raise ValueError(
            "suggest_cpu: the model's output holds no float tensor, so it has no signal-to-noise "
            "ratio; pass a metric"
        )
    return sum(found) / len(found)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for key in sorted(output, key=str):
            yield from _tensors(output[key])
    elif isinstance(output, list | tuple):
        for item in output:
            yield from _tensors(item)


class Measure:
    """A metric of models against one reference: its mean over the batches.

    Args:
        reference: The float form, whose outputs are kept.
        batches: What `forward` takes, one by one.
        forward: Runs a model on a batch; None spreads tuples and lists over the arguments and
            dicts over the keywords.
        metric: Of a model's output and the reference's.
    """

    def __init__(
        self,
        reference: nn.Module,
        batches: Sequence[Any],
        forward: Forward | None,
        metric: Metric,
    ) -> None:
        self._batches, self._forward, self._metric = batches, forward, metric
        self._expected = [call_model(reference, batch, forward) for batch in batches]

    def of(self, model: nn.Module, what: str) -> float:
        """The metric of a model; `what` names it in errors.

        Raises:
            ValueError: The metric is no finite number.
        """
        total = 0.0
        for index, (batch, expected) in enumerate(zip(self._batches, self._expected, strict=True)):
            output = call_model(model, batch, self._forward)
            value = float(self._metric(output, expected))
            if not math.isfinite(value):
                raise ValueError(
                    f"suggest_cpu: the metric of {what} is {value} on batch {index}; expected a "
                    "finite number: look for NaN or infinite values in that batch or in the model"
                )
            total += value
        return total / len(self._batches)


def call_model(model: nn.Module, batch: Any, forward: Forward | None) -> Any:
    """Run a batch without gradients; whatever is quantized in the output becomes a float."""
    with torch.no_grad():
        return DeQuantStub()((forward or _call)(model, batch))


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)
