"""Content of a sparse ONNX file, independent of its encoding: nodes over named tensors.

Each node class answers the same questions: names, channels, ranges, and its float form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from bevquant_graph import Guard

Sizes = tuple[int, ...]
# Attributes of a node in float; each class has some of these.
_FLOAT: dict[str, Any] = {
    **dict.fromkeys(("precision", "output_precision"), "fp16"),
    **dict.fromkeys(("input_range", "weight_ranges", "range_x", "range_other")),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class _Operation:
    """Common part of the nodes.

    Attributes:
        kind: Prefix of the node's name.
        path: Module of the exported model.
        y: Output.
        name: Name of the node.
    """

    kind: ClassVar[str]
    path: str
    y: str
    name: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Input tensors."""
        raise NotImplementedError

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

    def channels_made(self, read: Sequence[int]) -> int | None:
        """Channels of the output; 0 where unknown, None where it is not on voxels.

        Args:
            read: Channels of each input, 0 where unknown.

        Raises:
            ValueError: They do not fit.
        """
        return None


@dataclass(frozen=True, eq=False, kw_only=True)
class _Unary(_Operation):
    """A node with one input.

    Attributes:
        x: Input.
    """

    x: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """The input."""
        return (self.x,)


@dataclass(frozen=True, eq=False, kw_only=True)
class _OneRange(_Operation):
    """A node whose inputs and output have one scale.

    Attributes:
        output_precision: Precision of `y`.
        input_range: amax of inputs and output; None where they are not int8.
    """

    output_precision: str
    input_range: float | None

    @property
    def stated_ranges(self) -> Mapping[str, float]:
        """The one range, for inputs and output."""
        stated = self.input_range
        return {} if stated is None else dict.fromkeys((*self.inputs, self.y), stated)


@dataclass(frozen=True, eq=False, kw_only=True)
class Conv(_Unary):
    """A sparse convolution, with its ReLU.

    Attributes:
        weight: float16 ``[out_channels, k0, k1, k2, in_channels]``.
        bias: float16 ``[out_channels]``.
        kernel_size: Per axis, in the order of the coordinate columns, as the following sizes.
        stride: Voxels.
        padding: Voxels.
        dilation: Voxels.
        output_padding: Written, not used.
        subm: Submanifold.
        inverse: Inverse of the strided convolution with the same rulebook.
        rulebook: Key under which convolutions share their pairs; may be empty.
        activation: ``"ReLU"`` or ``"None"``.
        precision: Precision of the computation, ``"int8"`` or ``"fp16"``.
        output_precision: Precision of `y`.
        input_range: amax of x; not used in fp16.
        weight_ranges: amax per output channel; None where neither x nor y is int8.
        output_bound: Largest number of voxels of y.
        input_spatial_shape: Grid of x.
        output_spatial_shape: Grid of y.
        rows: Voxels of x and y in the example; placeholders.
    """

    kind: ClassVar[str] = "conv"
    weight: Tensor
    bias: Tensor
    kernel_size: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    output_padding: Sizes
    subm: bool
    inverse: bool
    rulebook: str
    activation: str
    precision: str
    output_precision: str
    input_range: float | None
    weight_ranges: tuple[float, ...] | None
    output_bound: int
    input_spatial_shape: Sizes
    output_spatial_shape: Sizes
    rows: tuple[int, int]

    @property
    def in_channels(self) -> int:
        """Channels of x."""
        return self.weight.shape[4]

    @property
    def out_channels(self) -> int:
        """Channels of y."""
        return self.weight.shape[0]

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
    x: str
    other: str
    precision: str
    output_precision: str
    range_x: float | None
    range_other: float | None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Both operands."""
        return (self.x, self.other)

    @property
    def stated_ranges(self) -> Mapping[str, float]:
        """Ranges of the operands."""
        given = {self.x: self.range_x, self.other: self.range_other}
        stated = given if self.precision == "int8" else {}
        return {name: amax for name, amax in stated.items() if amax is not None}

    def channels_made(self, read: Sequence[int]) -> int:
        """Channels of the operands."""
        _expect_equal(self.name, read)
        return read[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class Relu(_Unary):
    """``y = max(x, 0)``, only after an `Add`."""

    kind: ClassVar[str] = "relu"

    def channels_made(self, read: Sequence[int]) -> int:
        """Channels of the input."""
        return read[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class Concat(_OneRange):
    """Concatenated channels of tensors on the same voxels; libspconv has no such operator.

    Attributes:
        xs: Inputs, in order.
        precision: ``"int8"`` or ``"fp16"``.
    """

    kind: ClassVar[str] = "concat"
    xs: tuple[str, ...]
    precision: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs."""
        return self.xs

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
    """``y[n, k] = x[n, channels[k]]``; libspconv has no such operator.

    Attributes:
        channels: Channel of x for each channel of y.
        in_channels: Channels of x.
        activation: ``"ReLU"`` or ``"None"``.
    """

    kind: ClassVar[str] = "select"
    channels: Sizes
    in_channels: int
    activation: str

    def channels_made(self, read: Sequence[int]) -> int:
        """Number of selected channels, if the input has them."""
        _expect_equal(self.name, [*read, self.in_channels])
        if not all(0 <= channel < self.in_channels for channel in self.channels):
            raise ValueError(f"{self.name} takes {self.channels} of {self.in_channels} channels")
        return len(self.channels)


@dataclass(frozen=True, eq=False, kw_only=True)
class Pool(_OneRange, _Unary):
    """``y[o, c] = max x[i, c]`` over the voxels i of a window; libspconv has no such operator.

    Sizes are those of `Conv`; the input is pooled in its own form.
    """

    kind: ClassVar[str] = "pool"
    kernel_size: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    subm: bool
    rulebook: str
    input_spatial_shape: Sizes
    output_spatial_shape: Sizes
    inverse: ClassVar[bool] = False

    def channels_made(self, read: Sequence[int]) -> int:
        """Channels of the input."""
        return read[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class Steps(_Operation):
    """Operations between layers, as a function of standard operators; not in libspconv.

    `body` is an ``onnx.FunctionProto``. Its inputs are the features of `xs` (float32), the voxels
    of `places` (int64 ``[voxels, 4]``) and the number of frames (int64 ``[1]``). Its outputs are
    the features of y and, if y has its own voxels, these (int32).

    Attributes:
        xs: Tensors whose features it reads.
        ranges: amax of inputs that it reads as integers, else 0.
        places: Tensors whose voxels it reads.
        on: Index of an input on the voxels of y; −1 where `grid` is y's own, or none is.
        grid: Spatial shape of new voxels; empty without new voxels.
        channels: Channels of y.
        frames: Number of frames, if the function depends on it; else 0.
        body: The function, serialized.
        output_precision: Precision of `y`.
    """

    kind: ClassVar[str] = "steps"
    xs: tuple[str, ...]
    ranges: tuple[float, ...]
    places: tuple[str, ...]
    on: int
    grid: Sizes
    channels: int
    frames: int
    body: bytes
    output_precision: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Tensors that it reads."""
        return (*self.xs, *self.places)

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
    input_spatial_shape: Sizes
    format: str
    output_shape: Sizes


@dataclass(frozen=True, eq=False, kw_only=True)
class LayoutOp(_Unary):
    """``"Transpose"`` (`dims` is the permutation) or ``"Reshape"`` (`dims` is the new shape)."""

    op: str
    dims: Sizes

    @property
    def kind(self) -> str:  # type: ignore[override]
        """Kind of its operator."""
        return self.op.lower()


Node = Conv | Add | Relu | Concat | Fold | Select | Pool | Steps | Scatter | LayoutOp


@dataclass(frozen=True, eq=False, kw_only=True)
class Graph:
    """Nodes in order of execution.

    Attributes:
        input: Tensor of the voxels' features.
        channels: Its channels.
        nodes: In order.
        outputs: Tensors that the file returns.
        shapes: Shape of each output in the example, batch 1; placeholders for voxels.
        weights: Storage of integer weights in the portable form: ``"int8"``; ``"uint8"`` with zero
            point 128 where int8 would saturate on some CPU (`stored_weights`); ``"all uint8"`` for
            older files, which do not state it.
        features: Name of the features input in the portable form: "features" for the model's own
            input, or the name of the producing operation, as in "sigmoid_features".
        bounded: Whether more voxels than a layer's `output_bound` are refused, as an engine drops
            them; a portable file takes any number.
        guards: Conditions on the number of voxels and frames (``coords``, ``batch_size``) under
            which the file equals the model it was written from.
    """

    input: str
    channels: int
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    shapes: Mapping[str, Sizes] = field(default_factory=dict)
    weights: str = "uint8"
    features: str = "features"
    bounded: bool = True
    guards: tuple[Guard, ...] = ()


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
