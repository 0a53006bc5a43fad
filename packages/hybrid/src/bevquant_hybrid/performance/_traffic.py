"""How many bytes a call moves between DDR memory and the BPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from bevquant_hybrid.operators import OperatorCall, load_support_table

__all__ = ["BYTES", "Traffic", "count_traffic"]

# Per element, by dtype; a constant operand is stored quantized, like a weight.
BYTES = {"qint8": 1, "qint16": 2, "qint32": 4, "qbool": 1, "float32": 4, "constant": 1}
_ANCHORS = ("Conv2d", "Conv3d", "ConvTranspose2d", "Linear")
_FUSED = ("ReLU", "relu", "ReLU6", "relu6(fused)", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
# Quantized outside the BPU, optimised away, another view of the same bytes, or constant.
_FREE = (
    "QuantStub",
    "DeQuantStub",
    "Identity",
    "Dropout",
    "Dropout2d",
    "reshape",
    "AnchorGenerator",
)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one call.

    Attributes:
        loaded: Inputs and weights.
        stored: Its output.
        fused_into: Path of the layer that computes it on the way out; ``""`` if it is a layer.
    """

    loaded: int
    stored: int
    fused_into: str = ""


def count_traffic(calls: Sequence[OperatorCall]) -> list[Traffic]:
    """Bytes of each call, where every layer reads inputs and weights once and writes its output.

    Weights are int8, biases int32. An activation, batch norm or addition that alone reads a
    convolution's or linear layer's result is computed with it: it moves nothing but the other
    operand of the addition. What the documents give to the CPU moves nothing here.
    """
    readers = Counter(path for call in calls for path in set(call.inputs))
    layers: dict[str, str] = {}
    traffic = []
    for call in calls:
        name = call.operator.rpartition(".")[2]
        row = load_support_table().find(call.operator)
        if name in _FREE or (row is not None and row.on_cpu):
            traffic.append(Traffic(0, 0))
            continue
        host = _host(call, name, layers, readers)
        if name in _ANCHORS:
            layers[call.path] = call.path
        elif host is not None:
            layers[call.path] = layers[call.inputs[host]]
        loaded = sum(
            prod(shape) * BYTES[dtype]
            for i, (shape, dtype) in enumerate(
                zip(call.input_shapes, call.input_dtypes, strict=True)
            )
            if i != host
        )
        loaded += call.weight_count + 4 * call.bias_count
        stored = prod(call.output_shape) * BYTES[call.output_dtype]
        if host is not None:
            fused = name in _FUSED  # its scale and shift are folded into the layer's own
            traffic.append(Traffic(0 if fused else loaded, 0, layers[call.path]))
        else:
            traffic.append(Traffic(loaded, stored))
    return traffic


def _host(
    call: OperatorCall, name: str, layers: dict[str, str], readers: Counter[str]
) -> int | None:
    """Which input comes from the layer that ``call`` is computed with; None if it stands alone."""
    if name not in _FUSED and name != "add":
        return None
    for i, source in enumerate(call.inputs):
        if source in layers and readers[source] == 1:
            return i
    return None
