"""FP8 tensors and layers of a file: pairs of FP8 zero points, and weights stored in FP8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export.dense._graph import Array, Graph, TensorState
from bevquant_int8sim.program import FLOAT8, Step, float8_round, float8_steps

OPSET = 19  # the first one with FP8
_SUMS = ("Conv", "ConvTranspose", "Gemm", "Add")  # which no pair is moved over


def float8_array(tensor: Tensor) -> Array:
    """Numbers of torch's FP8 as numpy's, which onnx reads.

    Raises:
        ImportError: ml_dtypes is not installed.
    """
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            "FP8 in ONNX files needs ml_dtypes, which onnx 1.17 and later bring: "
            "pip install ml_dtypes"
        ) from error
    name = str(tensor.dtype).removeprefix("torch.")
    codes: Array = tensor.cpu().contiguous().view(torch.uint8).numpy()
    return codes.view(getattr(ml_dtypes, name))


def float8_pair(graph: Graph, path: str, x: str, scale: float, name: str) -> TensorState:
    """QuantizeLinear and DequantizeLinear of an FP8 tensor.

    ONNX Runtime (1.32) takes FP8 for uint8 where it fuses a Relu into QuantizeLinear: negative
    values come through. It stops at a Clip there. Both are held off.
    """
    makers = {output: node.op_type for node in graph.nodes for output in node.output}
    if graph.profile.runner == "onnxruntime" and makers.get(x) not in (None, *_SUMS):
        x = graph.held_off(path, x)
    zero = float8_array(torch.zeros((), dtype=FLOAT8[name].dtype))
    inputs = [
        graph.constant(f"{path}.scale" if path else "scale", scale),
        graph.zeros(zero.dtype, 0, ()),
    ]
    q = graph.node("QuantizeLinear", path, [x, *inputs])
    made = graph.node("DequantizeLinear", path, [q, *inputs])
    return TensorState(made, float8=(scale, name))


def as_weighted(step: Step) -> Step:
    """An FP8 layer in the form that `weighted_layer` takes."""
    layer: Any = step.module
    tensors = {"weight": layer.weight, "weight_scale": layer.weight_scale}
    if layer.bias is not None:
        tensors["bias"] = layer.bias
    return replace(step, op=layer.op, module=None, tensors=tensors, attributes=layer.settings)


def float8_steps_apart(want: Array, got: Array, step: Step) -> int:
    """Largest number of FP8 steps between two tensors of one scale."""
    return float8_steps(torch.from_numpy(want), torch.from_numpy(got), *step.args[1:])


def rounds_within(step: Step, x: Array, error: Array, got: Array) -> Array:
    """Whether each number is one that a value within `error` of x rounds to.

    Rounding keeps the order, so these lie between the roundings of x − error and x + error. Four
    roundings of float32 are added: of the quotient, or of a reciprocal, a product and a difference.
    """
    error = error + 4 * 2.0**-24 * np.abs(x)
    low, high = (
        float8_round(torch.from_numpy(np.float32(end)), *step.args[1:]).numpy()
        for end in (x - error, x + error)
    )
    inside: Array = (low <= got) & (got <= high)
    return inside
