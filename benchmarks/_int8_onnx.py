"""An integer model as a graph of onnxruntime's quantized operators.

Part of `python benchmarks/int8sim.py`. Activations become uint8, with zero point 0 behind a ReLU
(which saturation then does) and 128 elsewhere; weights stay int8. A sum's accumulators are
requantized first, to the range they have on the example: QLinearAdd adds integers. A transposed
convolution whose kernel is its stride is a 1×1 convolution and DepthToSpace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from bevquant_int8sim import IntegerModel
from bevquant_int8sim._grid_axes import per_axis
from bevquant_int8sim.program import (
    Add,
    Conv,
    ConvTranspose,
    LayoutCall,
    MaxPool,
    Step,
    names_in,
)

__all__ = ["Session"]


@dataclass(frozen=True)
class _Value:
    """A tensor of the graph: its integers q stand for (q − zero) · scale."""

    name: str
    scale: float
    zero: int


class _Graph:
    """Nodes of the graph; `amax` is the largest value of every int32 tensor on the example."""

    def __init__(self, model: IntegerModel, amax: dict[str, float]) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.values: dict[str, _Value] = {}
        self._forms = model.program.values
        self._amax = amax

    def constant(self, value: Any, dtype: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def scale(self, value: _Value) -> list[str]:
        return [self.constant(value.scale, np.float32), self.constant(value.zero, np.uint8)]

    def add_step(self, step: Step) -> None:
        kinds: dict[type[Step], Callable[[Any], None]] = {
            Add: self.addition,
            Conv: self.convolution,
            ConvTranspose: self.convolution,
            MaxPool: self.max_pool,
            LayoutCall: self.concatenation,
        }
        kinds[type(step)](step)

    def output(self, name: str, relu: bool) -> _Value:
        form: Any = self._forms[name].form
        scale = self._amax[name] / 127 if isinstance(form, str) else form.scale
        value = self.values[name] = _Value(name, scale, 0 if relu else 128)
        return value

    def node(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> None:
        self.nodes.append(helper.make_node(operator, inputs, [output], **attributes))

    def convolution(self, step: Conv | ConvTranspose) -> None:
        x = self.values[step.args[0].name]
        y = self.output(step.outputs[0], step.relu)
        weight, shuffled = step.weight, ""
        strides, sides = step.stride, step.padding
        bias, scales = step.bias, step.unit / x.scale
        if isinstance(step, ConvTranspose):
            s = weight.shape[2]
            assert tuple(weight.shape[2:]) == tuple(strides) == (s, s)
            assert not any(sides)
            # DepthToSpace reads channels in the order row, column, channel.
            weight = weight.permute(2, 3, 1, 0).reshape(-1, weight.shape[0], 1, 1)
            bias, scales = bias.repeat(s * s), scales.repeat(s * s)
            strides, sides, shuffled = (1, 1), ((0, 0), (0, 0)), f"{y.name}:deep"
        self.node(
            "QLinearConv",
            [
                x.name, *self.scale(x), self.constant(weight.numpy(), np.int8),
                self.constant(scales.numpy(), np.float32),
                self.constant(np.zeros(len(weight)), np.int8), *self.scale(y),
                self.constant(bias.numpy(), np.int32),
            ],
            shuffled or y.name,
            strides=list(strides), group=step.groups,
            pads=[p[0] for p in sides] + [p[1] for p in sides],
            kernel_shape=list(weight.shape[2:]),
        )  # fmt: skip
        if shuffled:
            self.node("DepthToSpace", [shuffled], y.name, blocksize=step.stride[0])

    def addition(self, step: Add) -> None:
        a, b = (self.values[ref.name] for ref in step.args)
        y = self.output(step.outputs[0], step.relu)
        inputs = [a.name, *self.scale(a), b.name, *self.scale(b), *self.scale(y)]
        self.node("QLinearAdd", inputs, y.name, domain="com.microsoft")

    def max_pool(self, step: Step) -> None:
        x, given = self.values[step.args[0].name], step.kwargs
        self.values[step.outputs[0]] = y = _Value(step.outputs[0], x.scale, x.zero)
        assert not given["ceil_mode"]
        names = ("kernel_size", "stride", "padding", "dilation")
        kernel, stride, padding, dilation = (per_axis(given[k], 2, k, 0) for k in names)
        assert dilation == (1, 1)
        self.node(
            "MaxPool", [x.name], y.name, kernel_shape=kernel, strides=stride, pads=padding * 2
        )

    def concatenation(self, step: Step) -> None:
        assert step.called == "cat"
        parts = [self.values[name] for name in names_in(step.args[0])]
        assert len({(p.scale, p.zero) for p in parts}) == 1
        name = step.outputs[0]
        self.values[name] = _Value(name, parts[0].scale, parts[0].zero)
        self.node("Concat", [p.name for p in parts], name, axis=step.args[1])


def _largest(model: IntegerModel, q: Tensor) -> dict[str, float]:
    """Largest value of every tensor that is held as accumulators."""
    found: dict[str, float] = {}

    def see(step: Step, given: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        for ref, value in zip(step.args, given, strict=True):
            if isinstance(step, Add) and value.dtype == torch.int32:
                scales = step.scales[step.args.index(ref)].view(-1, 1, 1)
                found[ref.name] = float((value * scales).abs().max())

    model.run((q,), record=False, observe=see)
    return found


class Session:
    """A model of integers in onnxruntime, on two threads with all optimisations.

    Args:
        model: From integers to integers.
        q: Its input, an example.
        floats: The graph begins and ends with floats.
    """

    def __init__(self, model: IntegerModel, q: Tensor, *, floats: bool) -> None:
        graph = _Graph(model, _largest(model, q))
        first = model.program.signature[0][0].name
        form: Any = model.program.values[first].form
        x = graph.values[first] = _Value(first, form.scale, 128)
        self._input = f"{first}:in" if floats else first
        if floats:
            graph.node("QuantizeLinear", [self._input, *graph.scale(x)], first)
        for step in model.program.steps:
            graph.add_step(step)
        self._results = [graph.values[name] for name in names_in(model.program.result)]
        names = [r.name for r in self._results]
        if floats:
            names = [f"{r.name}:out" for r in self._results]
            for r, name in zip(self._results, names, strict=True):
                graph.node("DequantizeLinear", [r.name, *graph.scale(r)], name)
        kind = TensorProto.FLOAT if floats else TensorProto.UINT8
        made = helper.make_graph(
            graph.nodes,
            "net",
            [helper.make_tensor_value_info(self._input, kind, list(q.shape))],
            [helper.make_tensor_value_info(name, kind, None) for name in names],
            graph.constants,
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        proto = helper.make_model(made, opset_imports=opsets, ir_version=8)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        self._session = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def run(self, x: Tensor) -> list[Any]:
        """The outputs for floats, or for what `shifted` makes of integers."""
        outputs: list[Any] = self._session.run(None, {self._input: x.numpy()})
        return outputs

    @staticmethod
    def shifted(q: Tensor) -> Tensor:
        """int8 as uint8 with zero point 128."""
        return (q.int() + 128).to(torch.uint8)

    def integers(self, outputs: list[Any]) -> list[Tensor]:
        """uint8 outputs without their zero points."""
        pairs = zip(outputs, self._results, strict=True)
        return [torch.from_numpy(y).int() - r.zero for y, r in pairs]
