"""Runs a graph, node by node, in integers or in floats.

Each consumer reads a tensor in the form that it needs, whatever the stored form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bevquant_export.sparse._axes import Voxels, convolved, refuse_more
from bevquant_export.sparse._channel_permutations import permutes_channels
from bevquant_export.sparse._check_graph import ConvConstants
from bevquant_export.sparse._graph import (
    Add,
    Concat,
    Conv,
    Fold,
    Graph,
    LayoutOp,
    Node,
    Pool,
    Relu,
    Scatter,
    Select,
    Steps,
)
from bevquant_export.sparse._steps import run_body
from bevquant_int8sim import (
    SparseOutput,
    dequantize,
    int8_add,
    int8_sparse_conv,
    quantize,
    requantize,
)
from bevquant_sparse import Rulebook, WeightLayout, sparse_conv, sparse_max_pool, to_dense

_STEPS = 127


@dataclass(frozen=True, eq=False)
class Floats:
    """float32 values."""

    values: Tensor

    def selected(self, channels: Tensor, relu: bool) -> Floats:
        """Some channels."""
        values = self.values[:, channels]
        return Floats(values.clamp(min=0) if relu else values)

    def floats(self) -> Tensor:
        """The values."""
        return self.values

    def integers(self, scale: float, name: str) -> Tensor:
        """round(x / scale), clamped to int8."""
        return quantize(self.values, scale, name=name)


@dataclass(frozen=True, eq=False)
class Integers:
    """int8 integers of one scale."""

    values: Tensor
    scale: float

    def selected(self, channels: Tensor, relu: bool) -> Integers:
        """Some channels."""
        values = self.values[:, channels]
        return Integers(values.clamp(min=0) if relu else values, self.scale)

    def floats(self) -> Tensor:
        """The integers times their scale."""
        return dequantize(self.values, self.scale)

    def integers(self, scale: float, name: str) -> Tensor:
        """The integers, which have that scale already."""
        if scale == self.scale:
            return self.values
        return requantize(self.values.to(torch.int32), self.scale / scale, name=name)


@dataclass(frozen=True, eq=False)
class Accumulators:
    """int32 sums of a convolution whose output is fp16: each consumer rounds them once.

    Attributes:
        values: ``[rows, channels]``.
        scale: float64 ``[channels]``.
        relu: Whether a ReLU follows.
    """

    values: Tensor
    scale: Tensor
    relu: bool

    def selected(self, channels: Tensor, relu: bool) -> Accumulators:
        """Some channels, not yet rounded."""
        return Accumulators(self.values[:, channels], self.scale[channels], self.relu or relu)

    def floats(self) -> Tensor:
        """float32(acc · scale)."""
        values = dequantize(self.values, self.scale, axis=-1)
        return values.clamp_(min=0) if self.relu else values

    def integers(self, scale: float, name: str) -> Tensor:
        """round(acc · (scale of the sum / scale))."""
        return requantize(self.values, self.scale / scale, axis=-1, relu=self.relu, name=name)


@dataclass(frozen=True, eq=False)
class Sum:
    """The sum of two int8 tensors, before it is rounded.

    Attributes:
        a: int8.
        b: int8.
        scale_a: Scale of `a`.
        scale_b: Scale of `b`.
        relu: Whether a ReLU follows.
    """

    a: Tensor
    b: Tensor
    scale_a: float
    scale_b: float
    relu: bool = False

    def selected(self, channels: Tensor, relu: bool) -> Sum:
        """Some channels, not yet rounded."""
        parts = self.a[:, channels], self.b[:, channels]
        return Sum(*parts, self.scale_a, self.scale_b, self.relu or relu)

    def floats(self) -> Tensor:
        """The sum a · scale_a + b · scale_b in float64, rounded to float32."""
        total = self.a.double() * self.scale_a + self.b.double() * self.scale_b
        return (total.clamp_(min=0) if self.relu else total).float()

    def integers(self, scale: float, name: str) -> Tensor:
        """round((a + b) · (s / scale)) for equal scales, else each with its own factor."""
        if self.scale_a == self.scale_b:
            total = self.a.to(torch.int32) + self.b.to(torch.int32)
            return requantize(total, self.scale_a / scale, relu=self.relu, name=name)
        factors = self.scale_a / scale, self.scale_b / scale
        return int8_add(self.a, self.b, *factors, relu=self.relu, name=name)


TensorState = Floats | Integers | Accumulators | Sum


See = Callable[[Node, TensorState, Tensor | None], None]


class FrameRun:
    """One call: the tensors so far and their voxels.

    Args:
        graph: The graph to run.
        constants: Constants of each convolution, by the name of its node.
        ranges: amax of each int8 tensor; None runs everything in float.
        backend: Kernels, see ``bevquant_int8sim.int8_sparse_conv``.
        see: Called with every node, its result and the coordinates of its rows.
    """

    def __init__(
        self,
        graph: Graph,
        constants: Mapping[str, ConvConstants],
        ranges: Mapping[str, float] | None,
        backend: str,
        see: See,
    ) -> None:
        self.graph = graph
        self.constants = constants
        self.ranges = ranges
        self.backend = backend
        self.see = see
        self.states: dict[str, TensorState] = {}
        self.voxels: dict[str, Voxels] = {}
        self._strided: dict[str, tuple[Rulebook, Voxels]] = {}
        self._before_relu = {node.x for node in graph.nodes if isinstance(node, Relu)}

    def run(self, features: Tensor, voxels: Voxels) -> tuple[Tensor | SparseOutput, ...]:
        """Outputs of the graph."""
        self.states[self.graph.input] = Floats(features)
        self.voxels[self.graph.input] = voxels
        last = {name: i for i, node in enumerate(self.graph.nodes) for name in node.inputs}
        for number, node in enumerate(self.graph.nodes):
            self.states[node.y] = self._step(node)
            voxels_made = self.voxels.get(node.y)
            indices = None if voxels_made is None else voxels_made.indices
            self.see(node, self.states[node.y], indices)
            for name in set(node.inputs):
                if last[name] == number and name not in self.graph.outputs:
                    del self.states[name]
        return tuple(self._output(name) for name in self.graph.outputs)

    def _output(self, name: str) -> Tensor | SparseOutput:
        values = self.states[name].floats()
        voxels = self.voxels.get(name)
        if voxels is None:
            return values
        shape = list(voxels.spatial_shape)
        return SparseOutput(values, voxels.indices, shape, voxels.batch_size)

    def _step(self, node: Node) -> TensorState:
        if isinstance(node, Conv):
            return self._conv(node)
        if isinstance(node, Add):
            return self._add(node)
        if isinstance(node, Concat):
            return self._concat(node)
        if isinstance(node, Fold):
            self.voxels[node.y] = self._on_voxels(node, node.x)
            x = self.states[node.x].floats()
            folded = x.reshape(len(x), node.channels, x.shape[1] // node.channels).sum(2)
            return self._stored(Floats(folded), node.y, node.name)
        if isinstance(node, Select):
            self.voxels[node.y] = self._on_voxels(node, node.x)
            channels = torch.tensor(node.channels)
            made = self.states[node.x].selected(channels, node.activation == "ReLU")
            return self._stored(made, node.y, node.name)
        if isinstance(node, Pool):
            return self._pool(node)
        if isinstance(node, Steps):
            return self._steps(node)
        if isinstance(node, Scatter):
            return self._scatter(node)
        if isinstance(node, LayoutOp):
            return Floats(self._layout_op(node))
        self.voxels[node.y] = self._on_voxels(node, node.x)
        summed = self.states[node.x]
        if isinstance(summed, Sum):
            return self._stored(replace(summed, relu=True), node.y, node.name)
        return self._stored(Floats(summed.floats().clamp(min=0)), node.y, node.name)

    def _stored(self, made: TensorState, tensor: str, name: str) -> TensorState:
        """The tensor in its stored form."""
        if self.ranges is None or tensor not in self.ranges:
            return made
        scale = self.ranges[tensor] / _STEPS
        return Integers(made.integers(scale, name), scale)

    def _on_voxels(self, node: Node, name: str) -> Voxels:
        if name not in self.voxels:
            raise ValueError(f"{node.name} reads {name!r}, a dense grid; it works on voxels")
        return self.voxels[name]

    def _check_same(self, node: Node, first: Voxels, second: Voxels) -> None:
        if first is not second and not torch.equal(first.indices, second.indices):
            raise ValueError(
                f"{node.name}: its operands lie on different voxels ({len(first.indices)} and "
                f"{len(second.indices)})"
            )

    def _conv(self, node: Conv) -> TensorState:
        pairs, made = convolved(self._on_voxels(node, node.x), node, self._strided)
        self.voxels[node.y] = made
        if self.graph.bounded:
            refuse_more(made, node)
        constants = self.constants[node.name]
        relu = node.activation == "ReLU"
        layout = WeightLayout.KRSC
        if self.ranges is None or node.precision != "int8":
            x = self.states[node.x].floats()
            if permutes_channels(node):  # as the model's torch.mm; products are rounded separately
                out = torch.mm(x, constants.weight.flatten(1).t()) + constants.bias
            else:
                out = sparse_conv(x, constants.weight, constants.bias, pairs, layout=layout)
            return self._stored(Floats(out.clamp_(min=0) if relu else out), node.y, node.name)
        q = self.states[node.x].integers(constants.input_scale, node.name)
        scale = constants.weight_scale * constants.input_scale
        target = self.ranges.get(node.y)
        out = int8_sparse_conv(
            q,
            constants.integer_weight,
            constants.integer_bias,
            pairs,
            layout=layout,
            multiplier=None if target is None else scale / (target / _STEPS),
            relu=relu and target is not None,
            backend=self.backend,
            name=node.name,
        )
        if target is None:
            return Accumulators(out, scale, relu)
        return Integers(out, target / _STEPS)

    def _pool(self, node: Pool) -> TensorState:
        pairs, self.voxels[node.y] = convolved(self._on_voxels(node, node.x), node, self._strided)
        x = self.states[node.x]
        if self.ranges is None or node.input_range is None:
            return self._stored(Floats(sparse_max_pool(x.floats(), pairs)), node.y, node.name)
        scale = node.input_range / _STEPS
        q = sparse_max_pool(x.integers(scale, node.name).float(), pairs)
        return Integers(q.to(torch.int8), scale)

    def _steps(self, node: Steps) -> TensorState:
        inputs = []
        for name, amax in zip(node.xs, node.ranges, strict=True):
            x = self.states[name]
            if amax and self.ranges is not None:
                x = Integers(x.integers(amax / _STEPS, node.name), amax / _STEPS)
            inputs.append(x.floats())
        places = [self._on_voxels(node, name) for name in node.places]
        frames = self.voxels[self.graph.input].batch_size
        if node.frames not in (0, frames):
            raise ValueError(
                f"{node.name}: {frames} frames; the model computes with the number of frames of "
                f"the example, {node.frames}"
            )
        inputs += [voxels.indices.long() for voxels in places]
        made = run_body(node.body, [*inputs, torch.tensor([frames])], made=1 + bool(node.grid))
        if node.grid:
            self.voxels[node.y] = Voxels(made[1], node.grid, frames)
        elif node.on >= 0:
            self.voxels[node.y] = self._on_voxels(node, node.inputs[node.on])
        return self._stored(Floats(made[0]), node.y, node.name)

    def _add(self, node: Add) -> TensorState:
        first = self._on_voxels(node, node.x)
        second = self._on_voxels(node, node.other)
        self._check_same(node, first, second)
        self.voxels[node.y] = first
        x, other = self.states[node.x], self.states[node.other]
        if self.ranges is None or node.precision != "int8":
            made: TensorState = Floats(x.floats() + other.floats())
        else:
            scale_x = float(node.range_x or 0.0) / _STEPS
            scale_other = float(node.range_other or 0.0) / _STEPS
            q_x = x.integers(scale_x, node.name)
            made = Sum(q_x, other.integers(scale_other, node.name), scale_x, scale_other)
        # A sum in front of a Relu is rounded once, after the Relu.
        return made if node.y in self._before_relu else self._stored(made, node.y, node.name)

    def _concat(self, node: Concat) -> TensorState:
        places = [self._on_voxels(node, name) for name in node.xs]
        for place in places[1:]:
            self._check_same(node, places[0], place)
        self.voxels[node.y] = places[0]
        given = [self.states[name] for name in node.xs]
        if self.ranges is None or node.input_range is None:
            made: TensorState = Floats(torch.cat([x.floats() for x in given], 1))
            return self._stored(made, node.y, node.name)
        scale = node.input_range / _STEPS
        return Integers(torch.cat([x.integers(scale, node.name) for x in given], 1), scale)

    def _scatter(self, node: Scatter) -> TensorState:
        voxels = self._on_voxels(node, node.x)
        values = self.states[node.x].floats()
        dense = to_dense(values, voxels.indices, voxels.spatial_shape, voxels.batch_size)
        return Floats(dense)

    def _layout_op(self, node: LayoutOp) -> Tensor:
        x = self.states[node.x].floats()
        if node.op == "Transpose":
            return x.permute(node.dims)
        return x.reshape(x.shape[0], *node.dims[1:])
