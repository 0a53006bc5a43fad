"""Tensors and products in blocks: MXFP8 and NVFP4.

MXFP8 is for ONNX Runtime: pairs of FP8 whose scales the file computes, block by block. NVFP4 is for
TensorRT, as ModelOpt writes it. The engine computes the scales of an activation from t:

    numbers, scales = TRT_FP4DynamicQuantize(x, t)
    values = DequantizeLinear(numbers, DequantizeLinear(scales, t), block_size=16)

Those of a weight are constants. TensorRT has FP4 for products of matrices alone, and quantizes two
or three axes. So a linear layer reads rows, and a convolution of 1×1 reads [batch, channels,
places].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bevquant_export._errors import QdqError
from bevquant_export.dense._source import Source
from bevquant_export.dense.nodes._at import reshaped, sliced
from bevquant_export.dense.nodes._graph import Graph, TensorState
from bevquant_export.lint._model import FP4_QUANTIZE, TRT
from bevquant_export.runtime._float4 import E2M1, E4M3, float8_array, float_types
from bevquant_int8sim.program import BlockLayer, Step
from bevquant_quantizers import format_of

_EXPONENT = 8  # of E4M3's largest power of two
_BLOCK = 32


def block_pair(graph: Graph, path: str, x: str, axis: int, channels: int) -> TensorState:
    """QuantizeLinear and DequantizeLinear with a scale for each block of 32 values of an axis."""
    sizes = graph.node("Abs", path, [x])
    largest = []
    for low in range(0, channels, _BLOCK):
        part = sliced(graph, path, sizes, {axis: (low, min(low + _BLOCK, channels), 1)})
        largest.append(graph.node("ReduceMax", path, [part], axes=[axis], keepdims=1))
    joined = largest[0] if len(largest) == 1 else graph.node("Concat", path, largest, axis=axis)
    scale = _scale(graph, path, joined)
    settings = {"axis": axis, "block_size": _BLOCK}
    q = graph.node("QuantizeLinear", path, [x, scale], output_dtype=E4M3, **settings)
    made = graph.node("DequantizeLinear", path, [q, scale], **settings)
    return TensorState(made, float8=(0.0, "mxfp8"))


def _scale(graph: Graph, path: str, largest: str) -> str:
    """2^(⌊log₂ largest⌋ − 8), at least 2⁻¹²⁷."""

    def number(value: float) -> str:
        return graph.constant(f"float32_{value:g}", value)

    def node(op: str, *inputs: str) -> str:
        return graph.node(op, path, list(inputs))

    # The logarithm may be off by its last digit near a power of two: both neighbours are compared.
    exponent = node("Floor", node("Mul", node("Log", largest), number(1 / math.log(2))))
    power = node("Pow", number(2.0), exponent)
    half = node("Mul", power, number(0.5))
    power = node("Where", node("Greater", power, largest), half, power)
    double = node("Mul", power, number(2.0))
    power = node("Where", node("LessOrEqual", double, largest), double, power)
    scale = node("Mul", power, number(2.0**-_EXPONENT))
    return node("Max", scale, number(2.0**-127))


def product_shape(shape: Sequence[Any], axis: int) -> list[Any]:
    """Shape of an NVFP4 tensor in front of its product: rows, or [batch, channels, places].

    `shape` is that of the layer's input, `axis` the one of its channels.
    """
    last = axis % len(shape) == len(shape) - 1
    return [-1, shape[-1]] if last else [shape[0], shape[1], -1]


def nvfp4_pair(graph: Graph, path: str, x: str, shape: Sequence[Any], args: Any) -> TensorState:
    """An activation of NVFP4, in the shape of `product_shape`.

    `shape` has names for free sizes; `args` are those of `blocks_round` behind the tensor.
    """
    amax, name, axis = args
    channels, block = shape[axis], format_of(name).block
    if channels % block:
        raise QdqError(
            f"{path}: {name} in blocks of {block}, and its input has {channels} channels: TensorRT "
            f"takes multiples of {block}. Give the layer another precision in the plan, or pad its "
            "channels"
        )
    flat = product_shape([0 if isinstance(n, str) else n for n in shape], axis)
    rows = x if len(shape) == 2 else graph.node("Reshape", path, [x, graph.numbers(flat)])
    t = _tensor_scale(amax)
    scale = graph.constant(f"{path}.tensor_scale", t)
    numbers = graph.node(
        FP4_QUANTIZE, path, [rows, scale], domain=TRT, axis=1, block_size=block, scale_type=E4M3
    )
    # The operator has a second output, and ONNX infers the types of neither.
    scales = f"{numbers}.scales"
    graph.nodes[-1].output.append(scales)
    graph.typed |= {numbers: E2M1, scales: E4M3}
    steps = graph.node("DequantizeLinear", path, [scales, scale])
    made = graph.node("DequantizeLinear", path, [numbers, steps], axis=1, block_size=block)
    return TensorState(made, float8=(amax, name))


def _tensor_scale(amax: float) -> Any:
    """The scale amax / (6 · 448) in float32, as `quantize_blocks` has it; 1 of 0."""
    return np.float32(amax) / np.float32(2688) or np.float32(1)


def nvfp4_product(graph: Graph, step: Step, layer: BlockLayer, x: str, source: Source) -> str:
    """The product of an NVFP4 layer with a tensor of `nvfp4_pair`, in the shape of its result."""
    path, settings = step.path, layer.settings
    sides = {side for pair in settings.get("padding", ()) for side in pair}
    if sides - {0} or {*settings.get("stride", ())} - {1}:
        raise QdqError(
            f"{path}: {layer.form}, and TensorRT has FP4 for products of matrices alone: expected "
            "a convolution of stride 1 without padding. Give it another precision in the plan"
        )
    weight = _nvfp4_weight(graph, path, layer)
    bias = [] if layer.bias is None else [layer.bias.cpu().numpy()]
    if layer.op == "linear":
        held = [graph.constant(f"{path}.bias", b) for b in bias]
        made = graph.node("Gemm", path, [x, weight, *held], transB=1)
    else:
        made = graph.node("MatMul", path, [weight, x])
        for b in bias:
            made = graph.node("Add", path, [made, graph.constant(f"{path}.bias", b[:, None])])
    if layer.op == "linear" and len(source.shapes[step.outputs[0]]) == 2:
        return made
    return reshaped(graph, path, made, source.target(path, step.outputs[0]))


def _nvfp4_weight(graph: Graph, path: str, layer: BlockLayer) -> str:
    """A weight as numbers of 4 bits, scales of 8, and t."""
    blocks, named = layer.blocks, f"{path}.weight"
    scales = float8_array(blocks.scales.flatten(1).to(torch.float8_e4m3fn))
    given = [
        graph.constant(f"{named}_scale", scales, scales.dtype),
        graph.constant(f"{named}_tensor_scale", blocks.tensor_scale.cpu().numpy()),
    ]
    steps = graph.node("DequantizeLinear", f"{named}_scale", given)
    fp4 = float_types().float4_e2m1fn
    numbers = blocks.numbers.flatten(1).cpu().numpy().astype(fp4)
    held = graph.constant(named, numbers, fp4)
    return graph.node("DequantizeLinear", named, [held, steps], axis=1, block_size=blocks.block)
