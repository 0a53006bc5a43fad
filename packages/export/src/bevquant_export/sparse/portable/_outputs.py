"""How a tensor is held in a portable model, the nodes that give each reader its form, and results.

The values and computations of ``sparse._run`` are written here, operation by operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bevquant_export.sparse._graph import Node
from bevquant_export.sparse.portable._body import FLOAT, INT8, INT32
from bevquant_export.sparse.portable._emit import Emitter, Settings
from bevquant_export.sparse.portable._voxel_sets import VoxelSet

_LOW = -128.0
_ZERO = 128  # of uint8
Channels = tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Tensor:
    """Attributes shared by all forms.

    Attributes:
        emitter: Takes the nodes.
        name: Node that made it, for the names of conversions.
        path: Module.
        made: Forms that are there already.
    """

    emitter: Emitter
    name: str
    path: str = ""
    made: dict[object, str] = field(default_factory=dict)

    def floats(self) -> str:
        """Tensor of float32 values."""
        if "float" not in self.made:
            self.made["float"] = self._floats(f"{self.name}.float")
        return self.made["float"]

    def integers(self, amax: float) -> str:
        """Tensor of uint8 with zero point 128 and scale amax/127."""
        if amax not in self.made:
            number = sum(isinstance(form, float) for form in self.made)
            name = f"{self.name}.int8" + (f" {number}" if number else "")
            self.made[amax] = self._integers(amax, name)
        return self.made[amax]

    def values_of(self, amax: float) -> str:
        """float32 values; of a range, those that the integers stand for."""
        if not amax:
            return self.floats()
        if ("float", amax) not in self.made:
            name = f"{self.integers(amax).partition(':')[0]}.values"
            self.made["float", amax] = self._call(
                "DequantizeInt8", [self.integers(amax)], name, {"range": amax}
            )
        return self.made["float", amax]

    def selected(self, channels: Channels, relu: bool, name: str, path: str) -> TensorState:
        """Some channels, with a ReLU behind them or not."""
        raise NotImplementedError

    def _taken(self, tensor: str, channels: Channels, name: str, axis: int = 1) -> str:
        """Entries of an axis: of equal steps by Slice, which copies them at once."""
        first, last = channels[0], channels[-1]
        step = channels[1] - first if len(channels) > 1 else 1
        if step > 0 and channels == tuple(range(first, last + 1, step)):
            given = {"starts": first, "ends": last + 1, "axes": axis, "steps": step}
            ends = [
                self.emitter.constant(f"{name}.{what}", np.array([number], np.int64))
                for what, number in given.items()
            ]
            return self.emitter.standard("Slice", [tensor, *ends], name, path=self.path)
        index = self.emitter.constant(f"{name}.channels", np.array(channels, np.int64))
        return self.emitter.standard("Gather", [tensor, index], name, {"axis": axis})

    def _call(self, function: str, inputs: list[str], name: str, settings: Settings) -> str:
        return self.emitter.call(function, inputs, name, settings, path=self.path)[0]

    def _floats(self, name: str) -> str:
        raise NotImplementedError

    def _integers(self, amax: float, name: str) -> str:
        raise NotImplementedError


@dataclass(frozen=True, eq=False, kw_only=True)
class Floats(_Tensor):
    """float32 values."""

    tensor: str

    def selected(self, channels: Channels, relu: bool, name: str, path: str) -> Floats:
        """Some channels."""
        made = self._taken(self.tensor, channels, name)
        made = _relu(self.emitter, made, name) if relu else made
        return Floats(emitter=self.emitter, name=name, path=path, tensor=made)

    def _floats(self, name: str) -> str:
        return self.tensor

    def _integers(self, amax: float, name: str) -> str:
        return self._call("Quantize", [self.tensor], name, {"range": amax})


@dataclass(frozen=True, eq=False, kw_only=True)
class Integers(_Tensor):
    """uint8 with zero point 128, of the range `amax`, which every reader of integers shares."""

    tensor: str
    amax: float

    def selected(self, channels: Channels, relu: bool, name: str, path: str) -> Integers:
        """Some channels."""
        made = self._taken(self.tensor, channels, name)
        if relu:
            zero = self.emitter.constant("zero point", np.array(_ZERO, np.uint8))
            made = self.emitter.standard("Clip", [made, zero], f"{name}.relu", path=path)
        return Integers(emitter=self.emitter, name=name, path=path, tensor=made, amax=self.amax)

    def _floats(self, name: str) -> str:
        return self._call("DequantizeInt8", [self.tensor], name, {"range": self.amax})

    def _integers(self, amax: float, name: str) -> str:
        if amax != self.amax:  # one range per int8 tensor: the graph was checked for it
            raise ValueError(f"{self.name} has the range {self.amax:g}; a reader wants {amax:g}")
        return self.tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Accumulators(_Tensor):
    """int32 sums of a convolution, rounded once for each reader.

    Attributes:
        sums: Tensor.
        weight_ranges: Tensor.
        input_range: amax of the convolution's input.
        relu: Whether a ReLU belongs to it.
    """

    sums: str
    weight_ranges: str
    input_range: float
    relu: bool

    def selected(self, channels: Channels, relu: bool, name: str, path: str) -> Accumulators:
        """Some channels, not yet rounded."""
        ranges = self._taken(self.weight_ranges, channels, f"{name}.weight_ranges", axis=0)
        return replace(
            self, sums=self._taken(self.sums, channels, name), weight_ranges=ranges, name=name,
            path=path, relu=self.relu or relu, made={},
        )  # fmt: skip

    def _floats(self, name: str) -> str:
        inputs, settings = [self.sums, self.weight_ranges], {"input_range": self.input_range}
        made = self._call("Dequantize", inputs, name, settings)
        return _relu(self.emitter, made, name) if self.relu else made

    def _integers(self, amax: float, name: str) -> str:
        settings = {
            "input_range": self.input_range,
            "output_range": amax,
            "low": 0.0 if self.relu else _LOW,
        }
        return self._call("Requantize", [self.sums, self.weight_ranges], name, settings)


@dataclass(frozen=True, eq=False, kw_only=True)
class Sum(_Tensor):
    """The sum of two int8 tensors before it is rounded to a form."""

    a: str
    b: str
    range_a: float
    range_b: float
    relu: bool = False

    def selected(self, channels: Channels, relu: bool, name: str, path: str) -> Sum:
        """Some channels, not yet rounded."""
        a, b = (
            self._taken(tensor, channels, f"{name}.{which}")
            for which, tensor in (("a", self.a), ("b", self.b))
        )
        relu = self.relu or relu
        return replace(self, a=a, b=b, name=name, path=path, relu=relu, made={})

    def behind_relu(self, name: str, path: str) -> Sum:
        """The same sum followed by a ReLU."""
        return replace(self, relu=True, name=name, path=path, made={})

    def _floats(self, name: str) -> str:
        settings = {"range_a": self.range_a, "range_b": self.range_b}
        made = self._call("AddDequantize", [self.a, self.b], name, settings)
        return _relu(self.emitter, made, name) if self.relu else made

    def _integers(self, amax: float, name: str) -> str:
        settings = {"output_range": amax, "low": 0.0 if self.relu else _LOW}
        settings["range_a"] = self.range_a
        if self.range_a == self.range_b:
            return self._call("AddEqual", [self.a, self.b], name, settings)
        settings["range_b"] = self.range_b
        return self._call("Add", [self.a, self.b], name, settings)


def _relu(emitter: Emitter, tensor: str, name: str) -> str:
    return emitter.standard("Relu", [tensor], f"{name}.relu")


TensorState = Floats | Integers | Accumulators | Sum


Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class LayerOutput:
    """Output of a run that holds a node's result.

    Attributes:
        node: The node.
        tensor: Output of the model.
        amax: Range of an int8 tensor; ``None`` for floats.
        coords: Output with the voxels of its rows, or the input ``"coords"``; ``""`` for a dense
            tensor.
        grid: Their spatial shape.
    """

    node: Node
    tensor: str
    amax: float | None
    coords: str
    grid: tuple[int, ...]


class Outputs:
    """Outputs of the model, in the order in which they are asked for.

    Args:
        emitter: Takes the nodes.
    """

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self._coords = {"input": "coords"}

    def layer(
        self, node: Node, state: TensorState, voxel_set: VoxelSet, shape: Shape
    ) -> LayerOutput:
        """Result of a node on voxels, under its name: int8 if stored as int8, else floats."""
        amax = state.amax if isinstance(state, Integers) else None
        if amax is None:
            self._give(state.floats(), node.name, FLOAT, shape)
        else:
            (made,) = self.emitter.call("Int8", [state.integers(amax)], f"{node.name}.signed")
            self._give(made, node.name, INT8, shape)
        if voxel_set.maker not in self._coords:
            self._coords[voxel_set.maker] = self._voxels(voxel_set, f"{voxel_set.maker}.coords")
        return LayerOutput(node, node.name, amax, self._coords[voxel_set.maker], voxel_set.grid)

    def result(
        self, name: str, node: Node, state: TensorState, voxel_set: VoxelSet | None, shape: Shape
    ) -> LayerOutput:
        """A result of the graph in floats, and its voxels where it is sparse."""
        self._give(state.floats(), name, FLOAT, shape)
        if voxel_set is None:
            return LayerOutput(node, name, None, "", ())
        return LayerOutput(
            node, name, None, self._voxels(voxel_set, f"{name}.coords"), voxel_set.grid
        )

    def _voxels(self, voxel_set: VoxelSet, name: str) -> str:
        cast = self.emitter.standard("Cast", [voxel_set.voxels], f"{name}.int32", {"to": INT32})
        self._give(cast, name, INT32, (voxel_set.rows, 4))
        return name

    def _give(self, tensor: str, name: str, kind: int, shape: Sequence[int | str]) -> None:
        self.emitter.output(tensor, name, kind, shape)
