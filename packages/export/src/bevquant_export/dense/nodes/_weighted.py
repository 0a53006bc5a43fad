"""Convolutions, transposed ones and linear layers with quantized weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export._cpu import stored_weights
from bevquant_export.dense._source import Source
from bevquant_export.dense.nodes._at import reshaped
from bevquant_export.dense.nodes._blocks import block_pair
from bevquant_export.dense.nodes._graph import Array, Graph, TensorState
from bevquant_export.runtime._float4 import float8_array
from bevquant_int8sim.program import (
    FLOAT8,
    BlockLayer,
    Conv,
    ConvTranspose,
    Dense,
    Float8Layer,
    Linear,
    Step,
    Weighted,
    blocks_round,
    float8_steps,
)
from bevquant_quantizers import format_of

# FP8 tensors and layers of a file: pairs of FP8 zero points, and weights stored in FP8.

OPSET = 19  # the first one with FP8
_SUMS = ("Conv", "ConvTranspose", "Gemm", "Add")  # which no pair is moved over


def float8_pair(graph: Graph, path: str, x: str, scale: float, name: str) -> TensorState:
    """QuantizeLinear and DequantizeLinear of an FP8 tensor."""
    x = _held_off(graph, path, x)
    zero = float8_array(torch.zeros((), dtype=FLOAT8[name].dtype))
    inputs = [
        graph.constant(f"{path}.scale" if path else "scale", scale),
        graph.zeros(zero.dtype, 0, ()),
    ]
    q = graph.node("QuantizeLinear", path, [x, *inputs])
    made = graph.node("DequantizeLinear", path, [q, *inputs])
    return TensorState(made, float8=(scale, name))


def block_tensor(graph: Graph, path: str, x: str, axis: int, channels: int) -> TensorState:
    """`block_pair`, held off like `float8_pair`."""
    return block_pair(graph, path, _held_off(graph, path, x), axis, channels)


def _held_off(graph: Graph, path: str, x: str) -> str:
    """The tensor in front of an FP8 pair."""
    # ONNX Runtime (1.32) takes FP8 for uint8 where it fuses a Relu into QuantizeLinear: negative
    # values come through. It stops at a Clip there. Both are held off.
    makers = {output: node.op_type for node in graph.nodes for output in node.output}
    fuses = graph.profile.runner == "onnxruntime" and makers.get(x) not in (None, *_SUMS)
    return graph.held_off(path, x) if fuses else x


_KINDS: dict[str, type[Any]] = {kind.op: kind for kind in (Conv, ConvTranspose, Linear)}


def as_weighted(step: Step, layer: Float8Layer) -> Dense:
    """An FP8 layer in the form that `weighted_layer` takes."""
    tensors = {"weight": layer.weight, "weight_scale": layer.weight_scale}
    if isinstance(layer, BlockLayer):
        blocks = layer.blocks
        tensors |= {"weight": blocks.numbers.to(torch.float8_e4m3fn), "block_scale": blocks.scales}
    if layer.bias is not None:
        tensors["bias"] = layer.bias
    called: Any = step.path, step.args, step.outputs
    made: Dense = _KINDS[layer.op](*called, form="float", **tensors, **layer.settings)
    return made


def float8_steps_apart(want: Array, got: Array, step: Step) -> int:
    """Largest number of FP8 steps between two tensors of one scale."""
    # In blocks of FP8 a step is at most an eighth of the value, but for subnormal numbers; in
    # blocks of FP4 at most the value.
    if step.target is blocks_round:
        size = np.maximum(np.maximum(abs(want), abs(got)), np.finfo(np.float32).tiny)
        steps = 1 if format_of(step.args[2]).bits == 4 else 8
        return int(np.ceil(steps * abs(want - got) / size).max(initial=0))
    return float8_steps(torch.from_numpy(want), torch.from_numpy(got), *step.args[1:])


def rounds_within(step: Step, x: Array, error: Array, got: Array) -> Array:
    """Whether each number is one that a value within `error` of x rounds to."""
    # Four roundings of float32: of the quotient, or of a reciprocal, a product and a difference.
    error = error + 4 * 2.0**-24 * np.abs(x)
    function: Any = step.target
    low, high = (
        function(torch.from_numpy(np.float32(end)), *step.args[1:]).numpy()
        for end in (x - error, x + error)
    )
    # Rounding keeps the order.
    inside: Array = (np.minimum(low, high) <= got) & (got <= np.maximum(low, high))
    return inside


@dataclass(frozen=True, eq=False)
class _Weight:
    """Integers or FP8, step size of each output channel, and the axis of the output channels."""

    integers: Array
    scales: Array
    axis: int
    groups: int

    @property
    def single(self) -> bool:
        """Whether all channels have one scale."""
        return bool((self.scales == self.scales[0]).all())

    @property
    def along_axis(self) -> Array | None:
        """A scale per entry of the axis; None where groups share an entry and differ."""
        if not self.axis:
            return self.scales
        each = self.scales.reshape(self.groups, -1)
        return each[0] if bool((each == each[0]).all()) else None


def block_of(graph: Graph, step: Step) -> int:
    """Side of the blocks of a transposed convolution without overlap; 0 for all others."""
    if not isinstance(step, ConvTranspose) or not graph.profile.depth_to_space or _has_float8(step):
        return 0
    sides = {*step.weight.shape[2:], *step.stride}
    nothing = {*step.padding, *step.output_padding} <= {0}
    flat = step.weight.dim() == 4 and {*step.dilation} == {1}
    return int(sides.pop()) if len(sides) == 1 and nothing and flat else 0


def _has_float8(step: Weighted) -> bool:
    return step.weight.dtype.is_floating_point


def _numbers(step: Weighted) -> Array:
    return float8_array(step.weight) if _has_float8(step) else step.weight.cpu().numpy()


def _as_convolution(step: ConvTranspose, block: int) -> Conv:
    r"""The transposed convolution as one of 1×1, whose channels are the block's pixels.

    With kernel and stride k no two windows meet:

    .. math:: y_{o,\,kh+i,\,kw+j} = b_o + \sum_c x_{c,h,w}\, W_{c,o,i,j}

    which is channel :math:`(o k + i) k + j` of a convolution at (h, w).
    """
    weight, groups = step.weight, step.groups
    channels, outputs = weight.shape[:2]
    split = weight.reshape(groups, channels // groups, outputs * block**2).transpose(1, 2)
    tensors: dict[str, Any] = {
        name: value.repeat_interleave(block**2) if value.dim() and value.numel() > 1 else value
        for name, value in step.tensors.items()
        if name != "weight"
    }
    return Conv(
        step.path, step.args, step.outputs, form=step.form, relu=step.relu, ceiling=step.ceiling,
        weight=split.reshape(-1, channels // groups, 1, 1).contiguous(), **tensors,
        stride=(1, 1), padding=((0, 0), (0, 0)), dilation=(1, 1), groups=groups,
    )  # fmt: skip


def weighted_layer(graph: Graph, step: Dense, x: TensorState, form: Any, source: Source) -> str:
    """The layer's nodes up to its float result, in front of a ReLU or a quantizer.

    Where `block_of` is not 0, the result's channels still have to become pixels.
    """
    block = block_of(graph, step)
    if block and isinstance(step, ConvTranspose):
        step = _as_convolution(step, block)
    path, scales = step.path, _scales(step, x, form)
    groups = step.groups if isinstance(step, Conv | ConvTranspose) else 1
    weight = _Weight(_numbers(step), scales, axis=step.out_axis, groups=groups)
    weight = _with_room_for_bias(graph, step, x, weight)
    bias = _bias(graph, step, x, weight.scales)
    if not isinstance(step, Conv | ConvTranspose):
        return _linear(graph, step, x, weight, bias, source)
    in_float = _is_float(graph, step, weight)
    read = graph.float_operand(path, x.name) if in_float else x.name
    inputs = [read, _weight(graph, step, weight), *([bias] if bias else [])]
    settings: dict[str, Any] = {
        "strides": list(step.stride),
        "dilations": list(step.dilation),
        "group": groups,
        "kernel_shape": list(weight.integers.shape[2:]),
    }
    if isinstance(step, Conv):
        pads = [low for low, _ in step.padding] + [high for _, high in step.padding]
        return graph.node("Conv", path, inputs, pads=pads, **settings)
    made = graph.node(
        "ConvTranspose", path, inputs, pads=[*step.padding] * 2,
        output_padding=list(step.output_padding), **settings,
    )  # fmt: skip
    if in_float and x.form is not None:
        graph.on_cpu += graph.nodes[-1:]
    return made


def _linear(
    graph: Graph, step: Dense, x: TensorState, weight: _Weight, bias: str, source: Source
) -> str:
    """Gemm, whose operands have two axes."""
    rank = len(source.shapes[step.args[0].name])
    name = x.name
    if rank != 2:
        name = graph.node(
            "Reshape", step.path, [x.name, graph.numbers([-1, weight.integers.shape[1]])]
        )
        # A Reshape keeps the scale: where the profile repeats pairs, it has one of its own.
        if x.form is not None and graph.profile.repeats:
            name = graph.quantized(step.path, name, x.form).name
        elif x.float8 is not None and x.float8[0] and graph.profile.repeats:
            name = float8_pair(graph, step.path, name, *x.float8).name
    inputs = [name, _weight(graph, step, weight), *([bias] if bias else [])]
    return graph.node("Gemm", step.path, inputs, transB=1)


def unflattened(graph: Graph, step: Step, state: TensorState, source: Source) -> TensorState:
    """The result of a linear layer with the axes of its input."""
    if not isinstance(step, Linear) or len(source.shapes[step.args[0].name]) == 2:
        return state
    name = reshaped(graph, step.path, state.name, source.target(step.path, step.outputs[0]))
    if state.form is None or not graph.profile.repeats:
        return TensorState(name, form=state.form, flat=state.integers)
    return graph.quantized(step.path, name, state.form)


def _scales(step: Weighted, x: TensorState, form: Any) -> Array:
    """Step size of each output channel's weight, float64."""
    if step.weight_scale is not None:
        given: Array = step.weight_scale.double().cpu().numpy()
        return given
    assert x.form is not None
    unit: Array = step.unit.double().cpu().numpy()
    return unit / x.form.scale


def _weight(graph: Graph, step: Weighted, weight: _Weight) -> str:
    """The node of the weight in the form that the layer multiplies."""
    path, profile = step.path, graph.profile
    if step.block_scale is not None:
        numbers = graph.constant(f"{path}.weight", weight.integers, weight.integers.dtype)
        blocks = graph.constant(f"{path}.weight_scale", step.block_scale.cpu().numpy())
        inputs = [numbers, blocks]
        return graph.node("DequantizeLinear", f"{path}.weight", inputs, axis=1, block_size=32)
    scales = weight.along_axis
    if scales is None or _is_float(graph, step, weight):
        return _float_weight(graph, path, weight)
    if (weight.axis or _has_float8(step)) and weight.single:
        scales = scales[:1].reshape(() if profile.axis else (1,))
    named = f"{path}.weight"
    scale = graph.constant(f"{named}_scale", scales)
    axis = {"axis": weight.axis} if profile.axis and scales.ndim else {}
    if _has_float8(step):
        zeros = graph.zeros(weight.integers.dtype, 0, scales.shape)
        source = graph.constant(named, weight.integers, weight.integers.dtype)
    elif profile.weight == "float":
        zeros = graph.zeros(np.int8, 0, scales.shape)
        values = weight.integers * _along(scales.astype(np.float32), weight)
        source = graph.constant(named, values)
        source = graph.node("QuantizeLinear", named, [source, scale, zeros], **axis)
    else:
        stored, zero = stored_weights(weight.integers, profile.weight)
        zeros = graph.zeros(stored.dtype.type, zero, scales.shape)
        source = graph.constant(named, stored, stored.dtype.type)
    return graph.node("DequantizeLinear", named, [source, scale, zeros], **axis)


def _is_float(graph: Graph, step: Weighted, weight: _Weight) -> bool:
    """Whether the scales of a transposed convolution's weight fit no axis that may have scales."""
    if not isinstance(step, ConvTranspose) or weight.single:
        return False
    return weight.along_axis is None or not graph.profile.transposed_per_channel


def _along(scales: Array, weight: _Weight) -> Array:
    shape = [1] * weight.integers.ndim
    shape[weight.axis] = -1
    return scales.reshape(shape)


def _float_weight(graph: Graph, path: str, weight: _Weight) -> str:
    """Weights of a transposed convolution as numbers: their scales fit no single axis."""
    each = "each of its groups has a scale" if weight.along_axis is None else "each channel has one"
    graph.notes.append(
        f"{path}: the weight of this transposed convolution is written as float numbers, each a "
        f"stored one times its scale, as {each} and the runtime takes one for all of it or none: "
        "it runs in float. Give its weight quantizer axis=None for one scale"
    )
    integers = weight.integers
    split = integers.astype(np.float64).reshape(weight.groups, -1, *integers.shape[1:])
    scales = weight.scales.reshape(weight.groups, 1, -1, *[1] * (integers.ndim - 2))
    return graph.constant(f"{path}.weight", (split * scales).reshape(integers.shape))


def _with_room_for_bias(graph: Graph, step: Weighted, x: TensorState, weight: _Weight) -> _Weight:
    """The weight in steps large enough that int32 holds the bias in steps of the sums."""
    bias = step.bias
    if bias is None or x.form is None or not _rounds_bias(graph, step, bias):
        return weight
    # A channel without weights, or with tiny ones, has a bias of more than 2³⁰ steps. Beside such a
    # bias the coarser weight does not change eight bits.
    needed = np.abs(bias.double().cpu().numpy()) / (x.form.scale * 2**30)
    larger = needed > weight.scales
    if not larger.any():
        return weight
    graph.notes.append(
        f"{step.path}: the weights of {int(larger.sum())} output channels are in larger steps than "
        "the model's, as int32 would not hold their bias"
    )
    scales = np.where(larger, needed, weight.scales)
    rounded = np.rint(weight.integers * _along(weight.scales / scales, weight))
    return replace(weight, integers=rounded.astype(np.int8), scales=scales)


def _rounds_bias(graph: Graph, step: Weighted, bias: Tensor) -> bool:
    """Whether a float bias becomes whole steps of the sums."""
    # Transposed convolutions run in float on every engine, so integers gain nothing.
    floats = bias.is_floating_point()
    return floats and graph.profile.integer_bias and not isinstance(step, ConvTranspose)


def _bias(graph: Graph, step: Weighted, x: TensorState, scales: Array) -> str:
    """The bias in the profile's form; empty without one."""
    if step.bias is None:
        return ""
    named, bias = f"{step.path}.bias", step.bias.double().cpu().numpy()
    floats, rounds = step.bias.is_floating_point(), _rounds_bias(graph, step, step.bias)
    accumulator = scales * (1.0 if x.form is None else x.form.scale)
    if x.form is None or not graph.profile.integer_bias or (floats and not rounds):
        return graph.constant(named, bias if floats else bias * accumulator)
    source = graph.constant(named, np.rint(bias / accumulator) if floats else bias, np.int32)
    scale = graph.constant(f"{named}_scale", accumulator)
    zeros = graph.zeros(np.int32, 0, accumulator.shape)
    return graph.node("DequantizeLinear", named, [source, scale, zeros], axis=0)
