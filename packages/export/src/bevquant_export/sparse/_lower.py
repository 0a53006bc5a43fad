"""A graph of the libspconv dialect as a model of standard operators.

The values and computations of ``sparse._run`` are written here, operation by operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

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
    Steps,
    first_on_input,
)
from bevquant_export.sparse._walk import Accumulators, Floats, GraphWalk, Integers, State
from bevquant_export.sparse._weights import float_matrix, integer_matrix
from bevquant_export.voxels._body import FLOAT, INT8, INT32, INT64
from bevquant_export.voxels._emit import Emitter, Settings
from bevquant_export.voxels._functions import scatter_name
from bevquant_export.voxels._sets import Surroundings, VoxelSet
from bevquant_export.voxels._window import Sizes

if TYPE_CHECKING:
    from onnx import ModelProto

_LOW = -128.0
_ZERO = 128  # of uint8
Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class LayerOutput:
    """Output of a run that holds a node's result."""

    node: Node  # The node
    tensor: str  # Output of the model
    amax: float | None  # Range of an int8 tensor; ``None`` for floats
    # Output with the voxels of its rows, or the input ``"coords"``; ``""`` for a dense
    # tensor
    coords: str
    grid: tuple[int, ...]  # Their spatial shape


@dataclass(frozen=True, eq=False)
class Lowered:
    """The model, its graph's outputs in order, and the layers that it shows."""

    model: ModelProto
    results: tuple[LayerOutput, ...]
    layers: tuple[LayerOutput, ...]


def lowered(graph: Graph, record: Mapping[str, str], *, all_layers: bool) -> Lowered:
    """Write every node of a checked, numbered graph in standard operators."""
    return _Lowering(graph, all_layers=all_layers).run(record)


class _Lowering(GraphWalk[str, VoxelSet]):
    """Tensors are names; integers are uint8 with zero point 128."""

    def __init__(self, graph: Graph, *, all_layers: bool) -> None:
        super().__init__(graph)
        self.all_layers = all_layers
        self.emitter = Emitter()
        self.surroundings = Surroundings(self.emitter.call)
        self.shapes: dict[str, Shape] = {}
        self.layers: list[LayerOutput] = []
        self.coords = {"input": "coords"}  # outputs with voxels, by their maker
        self.turned: set[str] = set()  # by a Transpose that its Scatter writes
        self.unchecked: set[str] = set()  # makers of voxels that may occur twice

    def run(self, record: Mapping[str, str]) -> Lowered:
        from onnx import helper

        graph = self.graph
        first = first_on_input(graph)
        if first is None:
            raise ValueError("no convolution reads the input, so its grid is unknown")
        voxel_set = self.surroundings.given(first.input_spatial_shape)
        found = self.surroundings.map_of(voxel_set)[2]
        checked = self.emitter.call("DistinctVoxels", [graph.features, found], "features checked")
        self.voxels[graph.input] = voxel_set
        self.shapes[graph.input] = ("voxels", graph.channels or getattr(first, "in_channels", 0))
        self.states[graph.input] = Floats(name="features", tensor=checked[0])
        self.walk()
        results = tuple(self._result(name) for name in graph.outputs)
        shape = self.shapes[graph.input]
        inputs = [
            helper.make_tensor_value_info(graph.features, FLOAT, shape),
            helper.make_tensor_value_info("coords", INT32, ["voxels", 4]),
            helper.make_tensor_value_info("batch_size", INT64, [1]),
        ]
        return Lowered(self.emitter.model(inputs, record), results, tuple(self.layers))

    # Outputs of the model

    def _done(self, node: Node) -> None:
        voxel_set = self.voxels.get(node.y)
        if node.on_voxels:
            channels = node.channels_made([int(self.shapes[x][1]) for x in node.inputs])
            rows = f"rows of {node.name}" if voxel_set is None else voxel_set.rows
            self.shapes[node.y] = (rows, channels)
        if not self.all_layers or not isinstance(node, Conv | Add | Relu) or voxel_set is None:
            return
        state, name, maker = self.states[node.y], node.name, voxel_set.maker
        amax = state.amax if isinstance(state, Integers) else None
        if isinstance(state, Integers):
            made = self._call("Int8", [state.tensor], f"{name}.signed")
            self.emitter.output(made, name, INT8, self.shapes[node.y])
        else:
            self.emitter.output(self.floats(state), name, FLOAT, self.shapes[node.y])
        if maker not in self.coords:
            self.coords[maker] = self._coords(voxel_set, f"{maker}.coords")
        self.layers.append(LayerOutput(node, name, amax, self.coords[maker], voxel_set.grid))

    def _result(self, tensor: str) -> LayerOutput:
        """A result of the graph in floats, and its voxels where it is sparse."""
        names = self.graph.outputs
        node = next(n for n in self.graph.nodes if n.y == tensor)
        name = "output" if len(names) == 1 else f"output{names.index(tensor)}"
        name = name if tensor.isdecimal() else tensor
        self.emitter.output(self.floats(self.states[tensor]), name, FLOAT, self.shapes[tensor])
        voxel_set = self.voxels.get(tensor)
        if voxel_set is None:
            return LayerOutput(node, name, None, "", ())
        coords = self._coords(voxel_set, f"{name}.coords")
        return LayerOutput(node, name, None, coords, voxel_set.grid)

    def _coords(self, voxel_set: VoxelSet, name: str) -> str:
        cast = self.emitter.standard("Cast", [voxel_set.voxels], f"{name}.int32", {"to": INT32})
        self.emitter.output(cast, name, INT32, (voxel_set.rows, 4))
        return name

    # Forms of a tensor

    def _call(
        self, function: str, inputs: list[str], name: str, settings: Settings | None = None,
        path: str = "",
    ) -> str:  # fmt: skip
        return self.emitter.call(function, inputs, name, settings, path=path)[0]

    def _as_floats(self, state: State[str]) -> str:
        name = f"{state.name}.float"
        if isinstance(state, Integers):
            return self._call(
                "DequantizeInt8", [state.tensor], name, {"range": state.amax}, state.path
            )
        assert not isinstance(state, Floats)
        if isinstance(state, Accumulators):
            inputs = [state.sums, state.weight_ranges]
            settings = {"input_range": state.input_range}
            made = self._call("Dequantize", inputs, name, settings, state.path)
        else:
            settings = {"range_a": state.range_a, "range_b": state.range_b}
            made = self._call("AddDequantize", [state.a, state.b], name, settings, state.path)
        return self._rectified(made, f"{name}.relu", "") if state.relu else made

    def _as_integers(self, state: State[str], amax: float, reader: str) -> str:
        number = sum(isinstance(form, float) for form in state.made)
        name = f"{state.name}.int8" + (f" {number}" if number else "")
        if isinstance(state, Floats):
            return self._call("Quantize", [state.tensor], name, {"range": amax}, state.path)
        if isinstance(state, Integers):  # one range per int8 tensor: the graph was checked for it
            raise ValueError(f"{state.name} has the range {state.amax:g}; a reader wants {amax:g}")
        settings = {"output_range": amax, "low": 0.0 if state.relu else _LOW}
        if isinstance(state, Accumulators):
            settings |= {"input_range": state.input_range}
            inputs, function = [state.sums, state.weight_ranges], "Requantize"
        else:
            equal = state.range_a == state.range_b
            settings |= {"range_a": state.range_a} | ({} if equal else {"range_b": state.range_b})
            inputs, function = [state.a, state.b], "AddEqual" if equal else "Add"
        return self._call(function, inputs, name, settings, state.path)

    def _values_of(self, state: State[str], q: str, amax: float) -> str:
        name = f"{q.partition(':')[0]}.values"
        return self._call("DequantizeInt8", [q], name, {"range": amax}, state.path)

    # Nodes

    def _apart(self, one: VoxelSet, other: VoxelSet) -> str:
        return "" if one is other else f": those of {one.maker} and of {other.maker}"

    def _neighbours(self, node: Conv | Pool) -> tuple[str, VoxelSet]:
        voxel_set = self.on_voxels(node, node.x)
        if voxel_set.maker in self.unchecked:
            self.unchecked.remove(voxel_set.maker)
            found = self.surroundings.map_of(voxel_set)[2]
            once = self._call("DistinctCoords", [voxel_set.voxels, found], f"{node.name}.once")
            checked = replace(voxel_set, voxels=once)
            self.voxels |= {n: checked for n, known in self.voxels.items() if known is voxel_set}
            voxel_set = checked
        return self.surroundings.convolved(voxel_set, node)

    def _convolved(self, node: Conv, x: str, rows: str, amax: float | None) -> State[str]:
        name, emitter, relu = node.name, self.emitter, node.activation == "ReLU"
        bias = emitter.constant(f"{name}.bias", node.bias.numpy())
        if amax is None:
            weight = emitter.constant(f"{name}.weight", float_matrix(node))
            made = self._call("FloatConvolution", [x, rows, weight, bias], name, path=node.path)
            return self._made(
                node, self._rectified(made, f"{name}.relu", node.path) if relu else made
            )
        stated = np.asarray(node.weight_ranges, np.float32)
        ranges = emitter.constant(f"{name}.weight_ranges", stated)
        matrix = integer_matrix(node, self.graph.weights)
        weight = emitter.constant(f"{name}.weight", matrix)
        inputs, settings = [x, rows, weight, bias, ranges], {"input_range": amax}
        function = "SignedConvolution" if matrix.dtype == np.int8 else "IntegerConvolution"
        sums = self._call(function, inputs, name, settings, node.path)
        return Accumulators(
            name=name, path=node.path, sums=sums, weight_ranges=ranges, input_range=amax, relu=relu
        )

    def _pooled(self, node: Pool, x: str, rows: str, integers: bool) -> str:
        return self._call("IntegerMaxPool" if integers else "MaxPool", [x, rows], node.name,
                          path=node.path)  # fmt: skip

    def _added(self, node: Add, x: str, other: str) -> str:
        return self.emitter.standard("Add", [x, other], node.name, path=node.path)

    def _rectified(self, x: str, name: str, path: str) -> str:
        return self.emitter.standard("Relu", [x], name, path=path)

    def _rectified_integers(self, x: str, name: str, path: str) -> str:
        zero = self.emitter.constant("zero point", np.array(_ZERO, np.uint8))
        return self.emitter.standard("Clip", [x, zero], name, path=path)

    def _joined(self, node: Concat, read: list[str]) -> str:
        return self.emitter.standard("Concat", read, node.name, {"axis": 1}, path=node.path)

    def _folded(self, node: Fold, x: str) -> str:
        name, emitter = node.name, self.emitter
        per_channel = int(self.shapes[node.x][1]) // node.channels
        split = self._shaped(x, (node.channels, per_channel), f"{name}.split", node.path, name)
        axes = emitter.constant(f"{name}.axes", np.array([2], np.int64))
        return emitter.standard("ReduceSum", [split, axes], name, {"keepdims": 0}, path=node.path)

    def _shaped(self, x: str, sizes: Sizes, made: str, path: str, name: str) -> str:
        """Reshape behind the first axis."""
        shape = self.emitter.constant(f"{name}.shape", np.array((0, *sizes), np.int64))
        return self.emitter.standard("Reshape", [x, shape], made, path=path)

    def _taken(self, tensor: str, channels: Sizes, name: str, path: str, axis: int) -> str:
        first, last = channels[0], channels[-1]
        step = channels[1] - first if len(channels) > 1 else 1
        if step > 0 and channels == tuple(range(first, last + 1, step)):
            given = {"starts": first, "ends": last + 1, "axes": axis, "steps": step}
            ends = [
                self.emitter.constant(f"{name}.{what}", np.array([number], np.int64))
                for what, number in given.items()
            ]
            return self.emitter.standard("Slice", [tensor, *ends], name, path=path)
        index = self.emitter.constant(f"{name}.channels", np.array(channels, np.int64))
        return self.emitter.standard("Gather", [tensor, index], name, {"axis": axis})

    def _called(self, node: Steps, read: list[str], places: Sequence[VoxelSet]) -> str:
        from onnx import FunctionProto

        made = self.emitter.call_own(
            FunctionProto.FromString(node.body),
            [*read, *(voxel_set.voxels for voxel_set in places), "batch_size"],
            node.name, made=1 + bool(node.grid), path=node.path,
        )  # fmt: skip
        if node.grid:
            self.voxels[node.y] = self.surroundings.given(node.grid, made[1], node.name)
            self.unchecked.add(self.voxels[node.y].maker)
        return made[0]

    def _scattered(self, node: Scatter, x: str, voxels: VoxelSet) -> str:
        turn = self._turn_behind(node)
        if turn is not None:
            self.turned.add(turn.y)
        name = scatter_name((0, 1, 2) if turn is None else tuple(d - 2 for d in turn.dims[2:]))
        inputs, settings = [x, voxels.voxels, "batch_size"], {"spatial_shape": voxels.grid}
        self.shapes[node.y] = ("batch", self.shapes[node.x][1], *voxels.grid)
        return self._call(name, inputs, node.name, settings, node.path)

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

    def _laid_out(self, node: LayoutOp, x: str) -> str:
        if node.x in self.voxels:
            raise ValueError(f"{node.name} reads {node.x!r}, voxels; it works on a dense grid")
        shape = self.shapes[node.x]
        if node.op == "Reshape":
            made = _reshaped(node, shape)
            self.shapes[node.y] = ("batch", *made)
            return self._shaped(x, made, node.name, node.path, node.name)
        if len(node.dims) != len(shape) or node.dims[0] != 0:
            raise ValueError(f"{node.name}: dims {node.dims} of {len(shape)} axes, batch first")
        self.shapes[node.y] = tuple(shape[d] for d in node.dims)
        if node.y in self.turned:
            return x
        settings: Settings = {"perm": node.dims}
        return self.emitter.standard("Transpose", [x], node.name, settings, path=node.path)


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
