"""Cost and gain of moves to the CPU: measured, and as rows, table and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, fx, nn

from bevquant_graph import HtmlText, on_batch
from bevquant_hybrid.nn.qat.stubs import DeQuantStub
from bevquant_hybrid.operators import OperatorCall, trace_calls
from bevquant_hybrid_tools.performance import ChipFigures, estimate_cpu_layers, estimate_layers
from bevquant_quantizers.documents import (
    DocumentError,
    Finite,
    JsonDocument,
    parse_json,
    text_table,
)

_BYTES = {"qint8": 1, "qint16": 2, "qint32": 4}

Metric = Callable[[Any, Any], float]
Forward = Callable[[nn.Module, Any], Any]
_MOST = 20 * math.log10(2**24)  # resolution of float32, in dB


class Measured(NamedTuple):
    """How well a model computes, and its estimated cost."""

    metric: float  # the metric
    milliseconds: float  # of all layers one after the other, and of the stubs between BPU and CPU
    transfer_bytes: int  # bytes of the integers that cross between BPU and CPU


def estimate_cost(
    model: fx.GraphModule, inputs: tuple[Any, ...], march: str, figures: ChipFigures | None
) -> tuple[float, int]:
    """Milliseconds of one run by roofline, and bytes that cross between BPU and CPU.

    Operators that read floats run on the CPU, and so do stubs.
    """
    calls = trace_calls(model, inputs)
    on_cpu = [call for call in calls if _is_stub(call) or "float32" in call.input_dtypes]
    on_bpu = [call for call in calls if _is_stub(call) or "float32" not in call.input_dtypes]
    layers = [
        *estimate_layers(on_bpu, march, figures=figures),
        *estimate_cpu_layers(on_cpu, march, figures=figures),
    ]
    return 1e3 * sum(layer.seconds for layer in layers), sum(
        map(_crossing, filter(_is_stub, calls))
    )


def _is_stub(call: OperatorCall) -> bool:
    return call.operator.endswith("Stub")


def _crossing(stub: OperatorCall) -> int:
    """Bytes of the integers that a stub takes or gives."""
    if stub.operator.endswith(".QuantStub"):
        changes = "float32" in stub.input_dtypes
        return prod(stub.output_shape) * _BYTES.get(stub.output_dtype, 0) if changes else 0
    pairs = zip(stub.input_shapes, stub.input_dtypes, strict=True)
    return sum(prod(shape) * _BYTES.get(dtype, 0) for shape, dtype in pairs)


def output_sqnr(output: Any, float_output: Any) -> float:
    r"""Signal to quantization noise in dB: :math:`10 \log_{10}(\sum f^2 / \sum (f - q)^2)`.

    Several output tensors count equally: the result is the mean of their ratios. It is limited to
    ±144.5 dB, the resolution of float32.

    Args:
        output: Output of the quantized model: a tensor, or lists, tuples and dicts of tensors.
        float_output: Output of its float form, with the same structure.

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
    """Floating-point tensors; of dicts by key, as two models may fill them in other orders."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for key in sorted(output, key=str):
            yield from _tensors(output[key])
    elif isinstance(output, list | tuple):
        for item in output:
            yield from _tensors(item)


class Metrics:
    """A metric of models against one reference, whose outputs are kept: its mean over batches."""

    def __init__(
        self, reference: nn.Module, batches: Sequence[Any], forward: Forward | None, metric: Metric
    ) -> None:
        self._forward, self._metric = forward, metric
        self._pairs = [(batch, call_model(reference, batch, forward)) for batch in batches]

    def __call__(self, model: nn.Module, what: str) -> float:
        """The metric of a model; `what` names it in errors."""
        total = 0.0
        for index, (batch, expected) in enumerate(self._pairs):
            value = float(self._metric(call_model(model, batch, self._forward), expected))
            if not math.isfinite(value):
                raise ValueError(
                    f"suggest_cpu: the metric of {what} is {value} on batch {index}; expected a "
                    "finite number: look for NaN or infinite values in that batch or in the model"
                )
            total += value
        return total / len(self._pairs)


def call_model(model: nn.Module, batch: Any, forward: Forward | None) -> Any:
    """Run a batch without gradients; quantized tensors in the output become floats."""
    with torch.no_grad():
        return DeQuantStub()(on_batch(forward)(model, batch))


_SCHEMA = "bevquant_hybrid.cpu_suggestion"
_VERSION = 1
_NOTE = (
    "Times are estimates by roofline from public figures, not measurements; metrics are measured."
)


class CpuMove(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer, or several that help only together, and the effect of moving it."""

    path: str  # name of the layer in `hybrid_dict`; of several, the first
    # The layers that move with it, because the value between them becomes a float
    others: tuple[str, ...]
    gain_alone: Finite  # gain of the metric if nothing else moves
    metric: Finite | None  # with this row and all above it moved; None for layers that stay
    milliseconds: Finite  # estimated time added to the rows above it; for layers that stay, alone
    transfer_bytes: int  # bytes added that cross between BPU and CPU, likewise
    reason: str  # why it moves, or stays

    @property
    def paths(self) -> tuple[str, ...]:
        """All layers of the row."""
        return (self.path, *self.others)

    @property
    def moves(self) -> bool:
        """Whether it is suggested."""
        return self.metric is not None


@dataclass(frozen=True)
class CpuSuggestion(HtmlText, JsonDocument):
    """Which layers should run on the CPU, in the order in which they were picked."""

    march: str  # the BPU architecture
    metric_name: str  # the measured quantity; larger is better
    as_given: float  # the metric of the model as it was given
    start: float  # the metric with only those layers on the CPU that must be there or were before
    start_milliseconds: float  # estimated time of that model for one run
    kept: tuple[str, ...]  # layers on the CPU before, by name or without a qconfig, and still there
    rows: tuple[CpuMove, ...]  # layers that move, in order, then the others, largest gain first

    @property
    def moves(self) -> tuple[CpuMove, ...]:
        """The rows that are suggested."""
        return tuple(row for row in self.rows if row.moves)

    @property
    def hybrid_dict(self) -> dict[str, list[Any]]:
        """For prepare_calibration_fx and prepare_qat_fx with ``hybrid=True``, and for partition."""
        moved = [path for row in self.moves for path in row.paths]
        return {"module_name": list(dict.fromkeys([*self.kept, *moved]))}

    @property
    def metric(self) -> float:
        """The metric with every suggested layer on the CPU."""
        found = [row.metric for row in self.rows if row.metric is not None]
        return found[-1] if found else self.start

    @property
    def added_milliseconds(self) -> float:
        """Estimated time that all suggested moves add."""
        return math.fsum(row.milliseconds for row in self.moves)

    def __str__(self) -> str:
        moved = sum(len(row.paths) for row in self.moves)
        title = (
            f"{moved} {'layer' if moved == 1 else 'layers'} to the CPU ({self.march}): "
            f"{self.metric_name} {self.start:.2f} -> {self.metric:.2f}, "
            f"estimated time {self.start_milliseconds:.3g} -> "
            f"{self.start_milliseconds + self.added_milliseconds:.3g} ms"
        )
        lines = [title, _table(self.rows), _NOTE]
        if self.as_given != self.start:
            before = f"With hybrid=True alone the model goes from {self.as_given:.2f} to "
            lines.insert(1, f"{before}{self.start:.2f}: some operators must run on the CPU then.")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The suggestion as JSON; `hybrid_dict` is written along for other readers."""
        data = {
            **{"schema": _SCHEMA, "version": _VERSION, "note": _NOTE},
            **vars(self),
            "rows": [msgspec.structs.asdict(row) for row in self.rows],
            "hybrid_dict": self.hybrid_dict,
        }
        return json.dumps(data, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CpuSuggestion:
        """Read and check the text of `to_json`.

        Raises:
            ValueError: If it is no such JSON, of another version, or contradicts itself.
        """
        data = parse_json(
            text,
            _Document,
            what="CPU suggestion",
            head={"schema": _SCHEMA, "version": _VERSION},
            remedy="suggest again with this version",
        )
        numbers = (data.as_given, data.start, data.start_milliseconds)
        made = cls(data.march, data.metric_name, *numbers, data.kept, data.rows)
        if data.hybrid_dict is not None and data.hybrid_dict != made.hybrid_dict:
            raise DocumentError("not a CPU suggestion: its hybrid_dict is not that of its rows")
        return made


class _Document(msgspec.Struct):
    march: str
    metric_name: str
    as_given: Finite
    start: Finite
    start_milliseconds: Finite
    kept: tuple[str, ...]
    rows: tuple[CpuMove, ...]
    hybrid_dict: Any = None


def _table(rows: tuple[CpuMove, ...]) -> str:
    head = ["", "layer", "alone", "metric", "ms", "bytes", "reason"]
    cells = [head]
    for number, row in enumerate(rows, 1):
        cells.append(
            [
                str(number) if row.moves else "-",
                " + ".join(row.paths),
                f"{row.gain_alone:+.2f}",
                "" if row.metric is None else f"{row.metric:.2f}",
                f"{row.milliseconds:+.3g}",
                f"{row.transfer_bytes:+,}",
                row.reason,
            ]
        )
    return text_table(cells, right=range(2, 6))
