"""A graph of the libspconv dialect as a model of standard operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bevquant_export.sparse._check_graph import tensor_ranges
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
    first_on_input,
)
from bevquant_export.sparse.portable._body import FLOAT, INT32, INT64
from bevquant_export.sparse.portable._emit import Emitter
from bevquant_export.sparse.portable._outputs import (
    Accumulators,
    Floats,
    Integers,
    LayerOutput,
    Outputs,
    Shape,
    Sum,
    TensorState,
)
from bevquant_export.sparse.portable._voxel_functions import scatter_name
from bevquant_export.sparse.portable._voxel_sets import Surroundings, VoxelSet
from bevquant_export.sparse.portable._weights import float_matrix, integer_matrix

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True, eq=False)
class Lowered:
    """The model, its graph's outputs in order, and the layers that it shows."""

    model: ModelProto
    results: tuple[LayerOutput, ...]
    layers: tuple[LayerOutput, ...]


def lowered(graph: Graph, record: Mapping[str, str], *, all_layers: bool) -> Lowered:
    """Write every node of a graph in standard operators.

    Args:
        graph: Checked, its nodes numbered, its ranges float32.
        record: Metadata of the model.
        all_layers: Whether every layer's result is an output.

    Raises:
        ValueError: A range is missing or readers of a tensor disagree, a sum may leave int32, or
            operands lie on different voxels; the node is named.
    """
    return _Lowering(graph).run(record, all_layers=all_layers)


class _Lowering:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ranges = tensor_ranges(graph)
        self.emitter = Emitter()
        self.surroundings = Surroundings(self.emitter)
        self.states: dict[str, TensorState] = {}
        self.voxel_sets: dict[str, VoxelSet] = {}
        self.shapes: dict[str, Shape] = {}
        self.outputs = Outputs(self.emitter)
        self.before_relu = {node.x for node in graph.nodes if isinstance(node, Relu)}
        self.turned: set[str] = set()  # by a Transpose that its Scatter writes
        self.unchecked: set[str] = set()  # makers of voxels that may occur twice

    def run(self, record: Mapping[str, str], *, all_layers: bool) -> Lowered:
        from onnx import helper

        self._input()
        shown = []
        for node in self.graph.nodes:
            self.states[node.y] = _STEPS[type(node)](self, node)
            if all_layers and isinstance(node, Conv | Add | Relu):
                state, voxel_set = self.states[node.y], self.voxel_sets[node.y]
                shown.append(self.outputs.layer(node, state, voxel_set, self.shapes[node.y]))
        results = tuple(self._result(name) for name in self.graph.outputs)
        inputs = [
            helper.make_tensor_value_info(
                self.graph.features, FLOAT, self.shapes[self.graph.input]
            ),
            helper.make_tensor_value_info("coords", INT32, ["voxels", 4]),
            helper.make_tensor_value_info("batch_size", INT64, [1]),
        ]
        return Lowered(self.emitter.model(inputs, record), results, tuple(shown))

    def _result(self, tensor: str) -> LayerOutput:
        names = self.graph.outputs
        node = next(n for n in self.graph.nodes if n.y == tensor)
        name = "output" if len(names) == 1 else f"output{names.index(tensor)}"
        name = name if tensor.isdecimal() else tensor
        state, voxel_set = self.states[tensor], self.voxel_sets.get(tensor)
        return self.outputs.result(name, node, state, voxel_set, self.shapes[tensor])

    def _input(self) -> None:
        graph = self.graph
        first = first_on_input(graph)
        if first is None:
            raise ValueError("no convolution reads the input, so its grid is unknown")
        voxel_set = self.surroundings.given(first.input_spatial_shape)
        found = self.surroundings.map_of(voxel_set)[2]
        checked = self.emitter.call("DistinctVoxels", [graph.features, found], "features checked")[
            0
        ]
        self.voxel_sets[graph.input] = voxel_set
        self.shapes[graph.input] = ("voxels", graph.channels or getattr(first, "in_channels", 0))
        self.states[graph.input] = Floats(emitter=self.emitter, name="features", tensor=checked)

    def _stored(self, made: TensorState, tensor: str, node: Node) -> TensorState:
        """`made` as the file holds the tensor."""
        if tensor not in self.ranges:
            return made
        amax = self.ranges[tensor]
        q = made.integers(amax)
        return Integers(emitter=self.emitter, name=node.name, path=node.path, tensor=q, amax=amax)

    def _floats(self, node: Node, tensor: str) -> Floats:
        return Floats(emitter=self.emitter, name=node.name, path=node.path, tensor=tensor)

    def _on_voxels(self, node: Node, name: str) -> VoxelSet:
        if name not in self.voxel_sets:
            raise ValueError(f"{node.name} reads {name!r}, a dense grid; it works on voxels")
        return self.voxel_sets[name]

    def _conv(self, node: Conv) -> TensorState:
        rows, made = self.surroundings.convolved(self._distinct(node), node)
        self.voxel_sets[node.y] = made
        self.shapes[node.y] = (made.rows, node.out_channels)
        name, emitter = node.name, self.emitter
        x = self.states[node.x]
        relu = node.activation == "ReLU"
        bias = emitter.constant(f"{name}.bias", node.bias.numpy())
        if node.precision != "int8" or node.input_range is None:
            weight = emitter.constant(f"{name}.weight", float_matrix(node))
            inputs = [x.floats(), rows, weight, bias]
            tensor = emitter.call("FloatConvolution", inputs, name, path=node.path)[0]
            if relu:
                tensor = emitter.standard("Relu", [tensor], f"{name}.relu", path=node.path)
            return self._stored(self._floats(node, tensor), node.y, node)
        stated = np.asarray(node.weight_ranges, np.float32)
        ranges = emitter.constant(f"{name}.weight_ranges", stated)
        matrix = integer_matrix(node, self.graph.weights)
        weight = emitter.constant(f"{name}.weight", matrix)
        inputs = [x.integers(node.input_range), rows, weight, bias, ranges]
        settings = {"input_range": node.input_range}
        function = "SignedConvolution" if matrix.dtype == np.int8 else "IntegerConvolution"
        summed = Accumulators(
            emitter=emitter,
            name=name,
            path=node.path,
            sums=emitter.call(function, inputs, name, settings, path=node.path)[0],
            weight_ranges=ranges,
            input_range=node.input_range,
            relu=relu,
        )
        return self._stored(summed, node.y, node)

    def _on_same_voxels(self, node: Node, *names: str) -> VoxelSet:
        first, *others = (self._on_voxels(node, name) for name in names)
        for other in others:
            if other is not first:
                raise ValueError(
                    f"{node.name}: its operands lie on different voxels: those of {first.maker} "
                    f"and of {other.maker}"
                )
        return first

    def _concat(self, node: Concat) -> TensorState:
        voxel_set = self.voxel_sets[node.y] = self._on_same_voxels(node, *node.xs)
        channels = sum(int(self.shapes[name][1]) for name in node.xs)
        self.shapes[node.y] = (voxel_set.rows, channels)
        given, amax = [self.states[name] for name in node.xs], node.input_range
        read = [x.floats() if amax is None else x.integers(amax) for x in given]
        joined = self.emitter.standard("Concat", read, node.name, {"axis": 1}, path=node.path)
        if amax is None:
            return self._stored(self._floats(node, joined), node.y, node)
        emitter, name, path = self.emitter, node.name, node.path
        return Integers(emitter=emitter, name=name, path=path, tensor=joined, amax=amax)

    def _fold(self, node: Fold) -> TensorState:
        voxel_set = self.voxel_sets[node.y] = self._on_voxels(node, node.x)
        self.shapes[node.y] = (voxel_set.rows, node.channels)
        name, emitter, path = node.name, self.emitter, node.path
        per_channel = int(self.shapes[node.x][1]) // node.channels
        sizes = emitter.constant(
            f"{name}.shape", np.array((0, node.channels, per_channel), np.int64)
        )
        x = self.states[node.x].floats()
        split = emitter.standard("Reshape", [x, sizes], f"{name}.split", path=path)
        axes = emitter.constant(f"{name}.axes", np.array([2], np.int64))
        settings = {"keepdims": 0}
        summed = emitter.standard("ReduceSum", [split, axes], name, settings, path=path)
        return self._stored(self._floats(node, summed), node.y, node)

    def _select(self, node: Select) -> TensorState:
        voxel_set = self.voxel_sets[node.y] = self._on_voxels(node, node.x)
        self.shapes[node.y] = (voxel_set.rows, len(node.channels))
        relu = node.activation == "ReLU"
        made = self.states[node.x].selected(node.channels, relu, node.name, node.path)
        return self._stored(made, node.y, node)

    def _distinct(self, node: Conv | Pool) -> VoxelSet:
        """The voxels that a layer reads, each once: those of `Steps` are checked where one does."""
        voxel_set = self._on_voxels(node, node.x)
        if voxel_set.maker not in self.unchecked:
            return voxel_set
        self.unchecked.remove(voxel_set.maker)
        found = self.surroundings.map_of(voxel_set)[2]
        (once,) = self.emitter.call(
            "DistinctCoords", [voxel_set.voxels, found], f"{node.name}.once"
        )
        checked = replace(voxel_set, voxels=once)
        self.voxel_sets |= {
            name: checked for name, known in self.voxel_sets.items() if known is voxel_set
        }
        return checked

    def _pool(self, node: Pool) -> TensorState:
        rows, made = self.surroundings.convolved(self._distinct(node), node)
        self.voxel_sets[node.y] = made
        self.shapes[node.y] = (made.rows, self.shapes[node.x][1])
        x, amax = self.states[node.x], node.input_range
        read = x.floats() if amax is None else x.integers(amax)
        function = "MaxPool" if amax is None else "IntegerMaxPool"
        (pooled,) = self.emitter.call(function, [read, rows], node.name, path=node.path)
        if amax is None:
            return self._stored(self._floats(node, pooled), node.y, node)
        emitter, name, path = self.emitter, node.name, node.path
        return Integers(emitter=emitter, name=name, path=path, tensor=pooled, amax=amax)

    def _steps(self, node: Steps) -> TensorState:
        from onnx import FunctionProto

        inputs = [
            self.states[x].values_of(amax) for x, amax in zip(node.xs, node.ranges, strict=True)
        ]
        inputs += [self._on_voxels(node, name).voxels for name in node.places]
        made = self.emitter.call_own(
            FunctionProto.FromString(node.body), [*inputs, "batch_size"], node.name,
            made=1 + bool(node.grid), path=node.path,
        )  # fmt: skip
        rows = f"rows of {node.name}"
        if node.grid:
            voxel_set = self.surroundings.given(node.grid, made[1], node.name)
            self.voxel_sets[node.y], rows = voxel_set, voxel_set.rows
            self.unchecked.add(voxel_set.maker)
        elif node.on >= 0:
            self.voxel_sets[node.y] = self._on_voxels(node, node.inputs[node.on])
            rows = self.voxel_sets[node.y].rows
        self.shapes[node.y] = (rows, node.channels)
        return self._stored(self._floats(node, made[0]), node.y, node)

    def _add(self, node: Add) -> TensorState:
        self.voxel_sets[node.y] = self._on_same_voxels(node, node.x, node.other)
        self.shapes[node.y] = self.shapes[node.x]
        x, other = self.states[node.x], self.states[node.other]
        made: TensorState
        if node.precision != "int8" or node.range_x is None or node.range_other is None:
            inputs = [x.floats(), other.floats()]
            tensor = self.emitter.standard("Add", inputs, node.name, path=node.path)
            made = self._floats(node, tensor)
        else:
            made = Sum(
                emitter=self.emitter,
                name=node.name,
                path=node.path,
                a=x.integers(node.range_x),
                b=other.integers(node.range_other),
                range_a=node.range_x,
                range_b=node.range_other,
            )
        # A sum that a Relu reads is rounded once, behind it.
        return made if node.y in self.before_relu else self._stored(made, node.y, node)

    def _relu(self, node: Relu) -> TensorState:
        self.voxel_sets[node.y] = self._on_voxels(node, node.x)
        self.shapes[node.y] = self.shapes[node.x]
        summed = self.states[node.x]
        if isinstance(summed, Sum):
            return self._stored(summed.behind_relu(node.name, node.path), node.y, node)
        tensor = self.emitter.standard("Relu", [summed.floats()], node.name, path=node.path)
        return self._stored(self._floats(node, tensor), node.y, node)

    def _scatter(self, node: Scatter) -> TensorState:
        voxel_set = self._on_voxels(node, node.x)
        inputs = [self.states[node.x].floats(), voxel_set.voxels, "batch_size"]
        turn = self._turn_behind(node)
        if turn is not None:
            self.turned.add(turn.y)
        name = scatter_name((0, 1, 2) if turn is None else tuple(d - 2 for d in turn.dims[2:]))
        settings = {"spatial_shape": voxel_set.grid}
        tensor = self.emitter.call(name, inputs, node.name, settings, path=node.path)[0]
        self.shapes[node.y] = ("batch", self.shapes[node.x][1], *voxel_set.grid)
        return self._floats(node, tensor)

    def _turn_behind(self, node: Scatter) -> LayoutOp | None:
        """The Transpose of the grid's axes that is the only consumer of a Scatter."""
        readers = [other for other in self.graph.nodes if node.y in other.inputs]
        if node.y in self.graph.outputs or len(readers) != 1:
            return None
        (reader,) = readers
        if not isinstance(reader, LayoutOp) or reader.op != "Transpose":
            return None
        of_the_grid = sorted(reader.dims) == list(range(5)) and reader.dims[:2] == (0, 1)
        return reader if of_the_grid else None

    def _layout_op(self, node: LayoutOp) -> TensorState:
        if node.x in self.voxel_sets:
            raise ValueError(f"{node.name} reads {node.x!r}, voxels; it works on a dense grid")
        shape, x = self.shapes[node.x], self.states[node.x].floats()
        if node.op == "Transpose":
            if len(node.dims) != len(shape) or node.dims[0] != 0:
                raise ValueError(f"{node.name}: dims {node.dims} of {len(shape)} axes, batch first")
            self.shapes[node.y] = tuple(shape[d] for d in node.dims)
            if node.y in self.turned:
                return self._floats(node, x)
            settings = {"perm": node.dims}
            tensor = self.emitter.standard("Transpose", [x], node.name, settings, path=node.path)
        else:
            made = _reshaped(node, shape)
            sizes = self.emitter.constant(f"{node.name}.shape", np.array((0, *made), np.int64))
            tensor = self.emitter.standard("Reshape", [x, sizes], node.name, path=node.path)
            self.shapes[node.y] = ("batch", *made)
        return self._floats(node, tensor)


def _reshaped(node: LayoutOp, shape: Shape) -> tuple[int, ...]:
    """Sizes of a frame behind a reshape."""
    sizes = [int(size) for size in shape[1:]]
    dims = list(node.dims[1:])
    if dims.count(-1) == 1:
        known = math.prod(d for d in dims if d != -1)
        dims[dims.index(-1)] = math.prod(sizes) // max(known, 1)
    if math.prod(dims) != math.prod(sizes) or min(dims, default=1) < 1:
        raise ValueError(f"{node.name}: dims {node.dims} for a frame of {tuple(sizes)}")
    return tuple(dims)


_STEPS: dict[type[Node], Callable[[_Lowering, Any], TensorState]] = {
    Conv: _Lowering._conv,
    Add: _Lowering._add,
    Relu: _Lowering._relu,
    Concat: _Lowering._concat,
    Fold: _Lowering._fold,
    Select: _Lowering._select,
    Pool: _Lowering._pool,
    Steps: _Lowering._steps,
    Scatter: _Lowering._scatter,
    LayoutOp: _Lowering._layout_op,
}
