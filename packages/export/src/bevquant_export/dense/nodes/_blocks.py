"""MXFP8 tensors of a file: pairs of FP8 whose scales the file computes, block by block."""

from __future__ import annotations

import math

from bevquant_export.dense.nodes._graph import Graph, TensorState
from bevquant_export.dense.nodes._layout_ops import sliced

_E4M3 = 17  # onnx.TensorProto's number
_EXPONENT = 8  # of E4M3's largest power of two
_BLOCK = 32


def block_pair(graph: Graph, path: str, x: str, axis: int, channels: int) -> TensorState:
    """QuantizeLinear and DequantizeLinear with a scale for each block of 32 values.

    Args:
        graph: Receives the nodes.
        path: Module.
        x: A tensor, held off from what ONNX Runtime fuses.
        axis: Axis of the blocks, from the front.
        channels: Its size.
    """
    sizes = graph.node("Abs", path, [x])
    largest = []
    for low in range(0, channels, _BLOCK):
        part = sliced(graph, path, sizes, {axis: (low, min(low + _BLOCK, channels), 1)})
        largest.append(graph.node("ReduceMax", path, [part], axes=[axis], keepdims=1))
    joined = largest[0] if len(largest) == 1 else graph.node("Concat", path, largest, axis=axis)
    scale = _scale(graph, path, joined)
    settings = {"axis": axis, "block_size": _BLOCK}
    q = graph.node("QuantizeLinear", path, [x, scale], output_dtype=_E4M3, **settings)
    made = graph.node("DequantizeLinear", path, [q, scale], **settings)
    return TensorState(made, float8=(0.0, "mxfp8"))


def _scale(graph: Graph, path: str, largest: str) -> str:
    """2^(⌊log₂ largest⌋ − 8), at least 2⁻¹²⁷.

    The logarithm may be off by its last digit near a power of two: both neighbours are compared.
    """

    def number(value: float) -> str:
        return graph.constant(f"float32_{value:g}", value)

    def node(op: str, *inputs: str) -> str:
        return graph.node(op, path, list(inputs))

    exponent = node("Floor", node("Mul", node("Log", largest), number(1 / math.log(2))))
    power = node("Pow", number(2.0), exponent)
    half = node("Mul", power, number(0.5))
    power = node("Where", node("Greater", power, largest), half, power)
    double = node("Mul", power, number(2.0))
    power = node("Where", node("LessOrEqual", double, largest), double, power)
    scale = node("Mul", power, number(2.0**-_EXPONENT))
    return node("Max", scale, number(2.0**-127))
