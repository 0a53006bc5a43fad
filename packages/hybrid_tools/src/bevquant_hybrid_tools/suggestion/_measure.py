"""What a form of a model costs: its error on data, and its time on the board, an estimate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from bevquant_graph import on_batch
from bevquant_hybrid.nn.qat.stubs import DeQuantStub
from bevquant_hybrid.operators import OperatorCall, trace_calls
from bevquant_hybrid_tools.performance import ChipFigures, estimate_cpu_layers, estimate_layers

_BYTES = {"qint8": 1, "qint16": 2, "qint32": 4}

Metric = Callable[[Any, Any], float]
Forward = Callable[[nn.Module, Any], Any]
_MOST = 20 * math.log10(2**24)  # what float32 itself resolves, in dB


@dataclass(frozen=True)
class Cost:
    """Of one run.

    Attributes:
        milliseconds: Of all layers one after the other, and of the stubs between BPU and CPU.
        transfer_bytes: Bytes of the integers that cross between BPU and CPU.
    """

    milliseconds: float
    transfer_bytes: int


def estimate_cost(
    model: fx.GraphModule, inputs: tuple[Any, ...], march: str, figures: ChipFigures | None
) -> Cost:
    """Estimate a prepared model by roofline: what reads floats runs on the CPU, as do stubs."""
    calls = trace_calls(model, inputs)
    on_cpu = [call for call in calls if _is_stub(call) or "float32" in call.input_dtypes]
    on_bpu = [call for call in calls if _is_stub(call) or "float32" not in call.input_dtypes]
    layers = [
        *estimate_layers(on_bpu, march, figures=figures),
        *estimate_cpu_layers(on_cpu, march, figures=figures),
    ]
    return Cost(1e3 * sum(layer.seconds for layer in layers), sum(map(_crossing, calls)))


def _is_stub(call: OperatorCall) -> bool:
    return call.operator.endswith("Stub")


def _crossing(call: OperatorCall) -> int:
    """Bytes of the integers that a stub takes or gives."""
    if not _is_stub(call):
        return 0
    if call.operator.endswith(".QuantStub"):
        changes = "float32" in call.input_dtypes
        return prod(call.output_shape) * _BYTES.get(call.output_dtype, 0) if changes else 0
    pairs: Sequence[tuple[tuple[int, ...], str]] = [
        *zip(call.input_shapes, call.input_dtypes, strict=True)
    ]
    return sum(prod(shape) * _BYTES.get(dtype, 0) for shape, dtype in pairs)


def positional(graph: fx.Graph, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call in the order of the graph's placeholders."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    given = [*args]
    for node in placeholders[len(given) :]:
        default = node.args[0] if node.args else None
        given.append(kwargs.get(str(node.target), default))
    return tuple(given)


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
        return DeQuantStub()(on_batch(forward)(model, batch))
