"""Convolutions, transposed ones and linear layers with quantized weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bevquant_export.dense._graph import Array, Graph, Held
from bevquant_export.dense._moves import reshaped
from bevquant_export.dense._sizes import Sizes
from bevquant_export.dense._source import Integers, Step

__all__ = ["unflattened", "weighted_layer"]


@dataclass(frozen=True, eq=False)
class _Weight:
    """Integers, value of one step of each output channel, and which axis numbers these."""

    integers: Array
    scales: Array
    axis: int

    @property
    def single(self) -> bool:
        """Whether all channels have one scale."""
        return bool((self.scales == self.scales[0]).all())


def weighted_layer(graph: Graph, step: Step, x: Held, form: Any, sizes: Sizes) -> str:
    """The layer's nodes up to its float result, which a ReLU or a quantizer follows."""
    assert x.form is not None
    attributes, path = step.attributes, step.path
    accumulator = _accumulator(step, form)
    axis = 1 if step.op == "conv_transpose" else 0
    weight = _Weight(step.tensors["weight"].cpu().numpy(), accumulator / x.form.scale, axis)
    bias = _bias(graph, step, accumulator)
    if step.op == "linear":
        return _linear(graph, step, x, weight, bias, sizes)
    held = graph.float_operand(path, x.name) if _is_float(graph, step, weight) else x.name
    inputs = [held, _weight(graph, step, weight), *([bias] if bias else [])]
    settings: dict[str, Any] = {
        "strides": list(attributes["stride"]),
        "dilations": list(attributes["dilation"]),
        "group": attributes["groups"],
        "kernel_shape": list(weight.integers.shape[2:]),
    }
    if step.op == "conv":
        sides = attributes["padding"]
        pads = [low for low, _ in sides] + [high for _, high in sides]
        return graph.node("Conv", path, inputs, pads=pads, **settings)
    padding = list(attributes["padding"])
    return graph.node(
        "ConvTranspose", path, inputs, pads=padding * 2,
        output_padding=list(attributes["output_padding"]), **settings,
    )  # fmt: skip


def _linear(graph: Graph, step: Step, x: Held, weight: _Weight, bias: str, sizes: Sizes) -> str:
    """Gemm, whose operands have two axes."""
    rank = len(sizes.of(step.args[0].name))
    name = x.name
    if rank != 2:
        assert x.form is not None
        flat = graph.node(
            "Reshape", step.path, [x.name, graph.numbers([-1, weight.integers.shape[1]])]
        )
        name = graph.quantized(step.path, flat, x.form).name
    inputs = [name, _weight(graph, step, weight), *([bias] if bias else [])]
    return graph.node("Gemm", step.path, inputs, transB=1)


def unflattened(graph: Graph, step: Step, held: Held, sizes: Sizes) -> Held:
    """The result of a linear layer with the axes of its input."""
    if step.op != "linear" or len(sizes.of(step.args[0].name)) == 2:
        return held
    name = reshaped(graph, step.path, held.name, sizes.target(step.path, step.outputs[0]))
    return Held(name) if held.form is None else graph.quantized(step.path, name, held.form)


def _accumulator(step: Step, form: Any) -> Array:
    """Value of one unit of each output channel's sum, float64."""
    if "scale" in step.tensors:
        scale: Array = step.tensors["scale"].double().cpu().numpy()
    else:
        unit = form.scale if isinstance(form, Integers) else 1.0
        scale = step.tensors["multiplier"].double().cpu().numpy() * unit
    return scale


def _weight(graph: Graph, step: Step, weight: _Weight) -> str:
    """The node that makes the weight as it is multiplied by."""
    path, profile = step.path, graph.profile
    scales = weight.scales
    if _is_float(graph, step, weight):
        return _float_weight(graph, path, weight, step.attributes["groups"])
    if weight.axis and weight.single:
        scales = scales[:1].reshape(() if profile.axis else (1,))
    named = f"{path}.weight"
    scale = graph.constant(f"{named}_scale", scales)
    axis = {"axis": weight.axis} if profile.axis and scales.ndim else {}
    dtype, zero = (np.uint8, 128) if profile.weight == "uint8" else (np.int8, 0)
    zeros = graph.zeros(dtype, zero, scales.shape)
    if profile.weight == "float":
        values = weight.integers * _along(scales.astype(np.float32), weight)
        source = graph.constant(named, values)
        source = graph.node("QuantizeLinear", named, [source, scale, zeros], **axis)
    else:
        source = graph.constant(named, weight.integers.astype(np.int16) + zero, dtype)
    return graph.node("DequantizeLinear", named, [source, scale, zeros], **axis)


def _is_float(graph: Graph, step: Step, weight: _Weight) -> bool:
    """Whether the scales of a transposed convolution's weight fit no axis that may have some."""
    if step.op != "conv_transpose" or weight.single:
        return False
    return step.attributes["groups"] > 1 or not graph.profile.transposed_per_channel


def _along(scales: Array, weight: _Weight) -> Array:
    shape = [1] * weight.integers.ndim
    shape[weight.axis] = -1
    return scales.reshape(shape)


def _float_weight(graph: Graph, path: str, weight: _Weight, groups: int) -> str:
    """Weights of a transposed convolution as numbers: their scales fit no single axis."""
    graph.notes.append(
        f"{path}: the weight of this transposed convolution is written as float numbers, each an "
        "integer times its scale, as the runtime takes one scale for all of it or none: it runs in "
        "float. Give its weight quantizer axis=None for int8"
    )
    integers = weight.integers
    split = integers.reshape(groups, -1, *integers.shape[1:])
    scales = weight.scales.reshape(groups, 1, -1, *[1] * (integers.ndim - 2))
    return graph.constant(f"{path}.weight", (split * scales).reshape(integers.shape))


def _bias(graph: Graph, step: Step, accumulator: Array) -> str:
    """The bias as the profile wants it; empty where there is none."""
    if "bias" not in step.tensors:
        return ""
    named, integers = f"{step.path}.bias", step.tensors["bias"].cpu().numpy()
    if not graph.profile.integer_bias:
        return graph.constant(named, integers * accumulator)
    source = graph.constant(named, integers, np.int32)
    scale = graph.constant(f"{named}_scale", accumulator)
    zeros = graph.zeros(np.int32, 0, accumulator.shape)
    return graph.node("DequantizeLinear", named, [source, scale, zeros], axis=0)
