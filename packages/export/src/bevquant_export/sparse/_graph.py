"""Content of a sparse ONNX file, independent of its encoding: nodes over named tensors.

Each node class answers the same questions: names, channels, ranges, and its float form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bevquant_export.voxels._window import Sizes, Window
from bevquant_graph import Guard
from bevquant_int8sim import quantize, quantize_bias

_STEPS = 127
# Attributes of a node in float; each class has some of these.
_FLOAT: dict[str, Any] = {
    **dict.fromkeys(("precision", "output_precision"), "fp16"),
    **dict.fromkeys(("input_range", "weight_ranges", "range_x", "range_other")),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class _Operation:
    """Common part of the nodes."""

    kind: ClassVar[str]  # Prefix of the node's name
    reads: ClassVar[tuple[str, ...]] = ("x",)  # Fields with the names of its inputs
    on_voxels: ClassVar[bool] = True  # Whether its output is
    path: str  # Module of the exported model
    y: str  # Output
    name: str = ""  # Name of the node

    @property
    def inputs(self) -> tuple[str, ...]:
        """Input tensors."""
        given = (getattr(self, name) for name in self.reads)
        return tuple(x for one in given for x in ((one,) if isinstance(one, str) else one))

    @property
    def stated_ranges(self) -> Mapping[str, float]:
        """Tensor to amax, where the node states it."""
        return {}

    @property
    def makes_int8(self) -> bool:
        """Whether its output is int8."""
        return getattr(self, "output_precision", "fp16") == "int8"

    def in_floats(self) -> Self:
        """The node in fp16, without ranges."""
        own = {one.name for one in fields(self)}
        return replace(self, **{name: value for name, value in _FLOAT.items() if name in own})

    def channels_made(self, read: Sequence[int]) -> int:
        """Channels of the output on voxels from those read; 0: unknown."""
        _expect_equal(self.name, read)
        return read[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Unary(_Operation):
    """A node with one input."""

    x: str  # Input


@dataclass(frozen=True, eq=False, kw_only=True)
class _OneRange(_Operation):
    """A node whose inputs and output have one scale."""

    output_precision: str  # Precision of `y`
    input_range: float | None  # amax of inputs and output; None where they are not int8

    @property
    def stated_ranges(self) -> Mapping[str, float]:
        """The one range, for inputs and output."""
        stated = self.input_range
        return {} if stated is None else dict.fromkeys((*self.inputs, self.y), stated)


@dataclass(frozen=True, eq=False, kw_only=True)
class Conv(Window, _Unary):
    """A sparse convolution, with its ReLU."""

    kind: ClassVar[str] = "conv"
    weight: Tensor  # float16 ``[out_channels, k0, k1, k2, in_channels]``
    bias: Tensor  # float16 ``[out_channels]``
    output_padding: Sizes  # Written, not used
    activation: str  # ``"ReLU"`` or ``"None"``
    precision: str  # Precision of the computation, ``"int8"`` or ``"fp16"``
    output_precision: str  # Precision of `y`
    input_range: float | None  # amax of x; not used in fp16
    # amax per output channel; None where neither x nor y is int8
    weight_ranges: tuple[float, ...] | None
    output_bound: int  # Largest number of voxels of y
    input_spatial_shape: Sizes  # Grid of x
    output_spatial_shape: Sizes  # Grid of y
    rows: tuple[int, int]  # Voxels of x and y in the example; placeholders

    @property
    def in_channels(self) -> int:
        """Channels of x."""
        return self.weight.shape[4]

    @property
    def out_channels(self) -> int:
        """Channels of y."""
        return self.weight.shape[0]

    @property
    def scales(self) -> tuple[float, Tensor]:
        """Steps of input and weight, the latter float64 ``[out_channels]``."""
        weight = torch.tensor(self.weight_ranges, dtype=torch.float64) / _STEPS
        return float(self.input_range or 0.0) / _STEPS, weight

    @cached_property
    def floats(self) -> tuple[Tensor, Tensor]:
        """Weight and bias, float32."""
        return self.weight.float(), self.bias.float()

    @cached_property
    def integers(self) -> tuple[Tensor, Tensor]:
        """round(w / s_w), int8, and round(b / (s_x · s_w)), int32."""
        weight = quantize(self.weight.float(), self.scales[1], axis=0, name=self.name)
        return weight, quantize_bias(self.bias.float(), *self.scales, name=self.name)

    @property
    def stated_ranges(self) -> Mapping[str, float]:
        """Range of the input."""
        stated = self.input_range if self.precision == "int8" else None
        return {} if stated is None else {self.x: stated}

    def channels_made(self, read: Sequence[int]) -> int:
        """Output channels of the weight."""
        _expect_equal(self.name, [*read, self.in_channels])
        return self.out_channels


@dataclass(frozen=True, eq=False, kw_only=True)
class Add(_Operation):
    """``y = x + other``; the ranges are those of its inputs, None in fp16."""

    kind: ClassVar[str] = "add"
    reads: ClassVar[tuple[str, ...]] = ("x", "other")
    x: str
    other: str
    precision: str
    output_precision: str
    range_x: float | None
    range_other: float | None

    @property
    def stated_ranges(self) -> Mapping[str, float]:
        """Ranges of the operands."""
        given = {self.x: self.range_x, self.other: self.range_other}
        stated = given if self.precision == "int8" else {}
        return {name: amax for name, amax in stated.items() if amax is not None}


@dataclass(frozen=True, eq=False, kw_only=True)
class Relu(_Unary):
    """``y = max(x, 0)``, only after an `Add`."""

    kind: ClassVar[str] = "relu"


@dataclass(frozen=True, eq=False, kw_only=True)
class Concat(_OneRange):
    """Concatenated channels of tensors on the same voxels; libspconv has no such operator."""

    kind: ClassVar[str] = "concat"
    reads: ClassVar[tuple[str, ...]] = ("xs",)
    xs: tuple[str, ...]  # Inputs, in order
    precision: str  # ``"int8"`` or ``"fp16"``

    def channels_made(self, read: Sequence[int]) -> int:
        """Sum of the inputs' channels."""
        return sum(read)


@dataclass(frozen=True, eq=False, kw_only=True)
class Fold(_Unary):
    """``y[n, c] = Σ_k x[n, c·K + k]`` in float, K channels of x to one of y; not in libspconv."""

    kind: ClassVar[str] = "fold"
    channels: int
    output_precision: str

    def channels_made(self, read: Sequence[int]) -> int:
        """The stated number, if it divides the input's channels."""
        if self.channels < 1 or read[0] % self.channels:
            raise ValueError(f"{self.name} folds {read[0]} channels into {self.channels}")
        return self.channels


@dataclass(frozen=True, eq=False, kw_only=True)
class Select(_OneRange, _Unary):
    """``y[n, k] = x[n, channels[k]]``; libspconv has no such operator."""

    kind: ClassVar[str] = "select"
    channels: Sizes  # Channel of x for each channel of y
    in_channels: int  # Channels of x
    activation: str  # ``"ReLU"`` or ``"None"``

    def channels_made(self, read: Sequence[int]) -> int:
        """Number of selected channels, if the input has them."""
        _expect_equal(self.name, [*read, self.in_channels])
        if not all(0 <= channel < self.in_channels for channel in self.channels):
            raise ValueError(f"{self.name} takes {self.channels} of {self.in_channels} channels")
        return len(self.channels)


@dataclass(frozen=True, eq=False, kw_only=True)
class Pool(Window, _OneRange, _Unary):
    """``y[o, c] = max x[i, c]`` over the voxels i of a window; libspconv has no such operator.

    The input is pooled in its own form.
    """

    kind: ClassVar[str] = "pool"
    input_spatial_shape: Sizes
    output_spatial_shape: Sizes


@dataclass(frozen=True, eq=False, kw_only=True)
class Steps(_Operation):
    """Operations between layers, as a function of standard operators; not in libspconv.

    `body` is an ``onnx.FunctionProto``. Its inputs are the features of `xs` (float32), the voxels
    of `places` (int64 ``[voxels, 4]``) and the number of frames (int64 ``[1]``). Its outputs are
    the features of y and, if y has its own voxels, these (int32).
    """

    kind: ClassVar[str] = "steps"
    reads: ClassVar[tuple[str, ...]] = ("xs", "places")
    xs: tuple[str, ...]  # Tensors whose features it reads
    ranges: tuple[float, ...]  # amax of inputs that it reads as integers, else 0
    places: tuple[str, ...]  # Tensors whose voxels it reads
    on: int  # Index of an input on the voxels of y; −1 where `grid` is y's own, or none is
    grid: Sizes  # Spatial shape of new voxels; empty without new voxels
    channels: int  # Channels of y
    frames: int  # Number of frames, if the function depends on it; else 0
    body: bytes  # The function, serialized
    output_precision: str  # Precision of `y`

    @property
    def stated_ranges(self) -> Mapping[str, float]:
        """Ranges of inputs that it reads as integers."""
        return {x: amax for x, amax in zip(self.xs, self.ranges, strict=True) if amax}

    def in_floats(self) -> Self:
        """The node with an fp16 output."""
        return replace(super().in_floats(), ranges=(0.0,) * len(self.xs))

    def channels_made(self, read: Sequence[int]) -> int:
        """The stated number."""
        return self.channels


@dataclass(frozen=True, eq=False, kw_only=True)
class Scatter(_Unary):
    """Voxels to a dense grid ``output_shape``: batch, channels, then the axes as `format` says."""

    kind: ClassVar[str] = "scatter"
    on_voxels: ClassVar[bool] = False
    input_spatial_shape: Sizes
    format: str
    output_shape: Sizes


@dataclass(frozen=True, eq=False, kw_only=True)
class LayoutOp(_Unary):
    """``"Transpose"`` (`dims` is the permutation) or ``"Reshape"`` (`dims` is the new shape)."""

    on_voxels: ClassVar[bool] = False
    op: str
    dims: Sizes

    @property
    def kind(self) -> str:  # type: ignore[override]
        """Kind of its operator."""
        return self.op.lower()


Node = Conv | Add | Relu | Concat | Fold | Select | Pool | Steps | Scatter | LayoutOp


@dataclass(frozen=True, eq=False, kw_only=True)
class Graph:
    """Nodes in order of execution."""

    input: str  # Tensor of the voxels' features
    channels: int  # Its channels
    nodes: tuple[Node, ...]  # In order
    outputs: tuple[str, ...]  # Tensors that the file returns
    # Shape of each output in the example, batch 1; placeholders for voxels
    shapes: Mapping[str, Sizes] = field(default_factory=dict)
    # Storage of integer weights in the portable form: ``"int8"``; ``"uint8"`` with zero
    # point 128 where int8 would saturate on some CPU (`stored_weights`); ``"all uint8"``
    # for older files, which do not state it
    weights: str = "uint8"
    # Name of the features input in the portable form: "features" for the model's own input,
    # or the name of the producing operation, as in "sigmoid_features"
    features: str = "features"
    # Whether more voxels than a layer's `output_bound` are refused, as an engine drops
    # them; a portable file takes any number
    bounded: bool = True
    # Conditions on the number of voxels and frames (``coords``, ``batch_size``) under which
    # the file equals the model it was written from
    guards: tuple[Guard, ...] = ()

    def in_floats(self) -> Graph:
        """The graph with every layer in fp16, which runs in float32."""
        return replace(self, nodes=tuple(node.in_floats() for node in self.nodes))


def first_on_input(graph: Graph) -> Conv | Pool | None:
    """The first convolution or pooling on the input's voxels that states their grid."""
    given = {graph.input}
    for node in graph.nodes:
        if not given.intersection(node.inputs):
            continue
        if isinstance(node, Conv | Pool) and node.input_spatial_shape:
            return node
        if not isinstance(node, Steps) or (node.on >= 0 and node.inputs[node.on] in given):
            given.add(node.y)
    return None


def _expect_equal(name: str, channels: Sequence[int]) -> None:
    known = set(channels) - {0}
    if len(known) > 1:
        raise ValueError(f"{name} reads tensors of {sorted(known)} channels")
