"""What a prepared model costs on the board, BPU and CPU together: an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from bevquant_hybrid.operators import OperatorCall, trace_calls
from bevquant_hybrid.performance import ChipFigures, estimate_cpu_layers, estimate_layers

__all__ = ["Cost", "estimate_cost", "positional"]

_BYTES = {"qint8": 1, "qint16": 2, "qint32": 4}


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
