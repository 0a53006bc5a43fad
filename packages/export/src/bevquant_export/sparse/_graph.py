"""What a sparse ONNX file says, apart from how it says it: nodes over named tensors.

What is asked of every node is answered by its class here: names, channels, ranges, and the same in
floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from torch import Tensor

__all__ = [
    "Add", "Concat", "Conv", "Fold", "Graph", "Move", "Node", "Pool", "Relu", "Scatter", "Select",
    "Steps", "first_on_input", "inputs_of", "renamed",
]  # fmt: skip

Sizes = tuple[int, ...]


class _Operation:
    """What most nodes answer.

    Attributes:
        kind: What the node's name starts with.
    """

    kind: ClassVar[str]

    @property
    def stated_ranges(self) -> Mapping[str, float]:
        """Tensor to amax, as far as the node says it."""
        return {}

    @property
    def makes_int8(self) -> bool:
        """Whether its result is held in int8."""
        return getattr(self, "output_precision", "fp16") == "int8"

    def in_floats(self) -> Self:
        """The node that computes in fp16 and says no ranges."""
        return self

    def channels_made(self, read: Sequence[int]) -> int | None:
        """Channels of the result; 0 where they are not known, None where it lies on no voxels.

        Args:
            read: Channels of each tensor read, 0 where they are not known.

        Raises:
            ValueError: They do not fit.
        """
        return None


@dataclass(frozen=True, eq=False, kw_only=True)
class Conv(_Operation):
    """A sparse convolution, its ReLU included.

    Attributes:
        path: Module of the exported model.
        x: Tensor read.
        y: Tensor made.
        weight: float16 ``[out_channels, k0, k1, k2, in_channels]``.
        bias: float16 ``[out_channels]``.
        kernel_size: Per axis, in the order of the coordinate columns, like all that follow.
        stride: Voxels.
        padding: Voxels.
        dilation: Voxels.
        output_padding: Written, not used.
        subm: Submanifold.
        inverse: Undoes the strided convolution of the same rulebook.
        rulebook: Key under which convolutions share their pairs; may be empty.
        activation: ``"ReLU"`` or ``"None"``.
        precision: ``"int8"`` or ``"fp16"``: what it computes in.
        output_precision: How `y` is held.
        input_range: amax of x; in fp16 nothing is computed with it.
        weight_ranges: amax per output channel; ``None`` where neither x nor y is int8.
        output_bound: Most voxels that y may have.
        input_spatial_shape: Grid of x.
        output_spatial_shape: Grid of y.
        rows: Voxels of x and y in the example; placeholders.
        name: Name of the node.
    """

    path: str
    x: str
    y: str
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
    name: str = ""

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
        """Of what it reads."""
        said = self.input_range if self.precision == "int8" else None
        return {} if said is None else {self.x: said}

    def in_floats(self) -> Self:
        """As it is in fp16."""
        return replace(
            self, precision="fp16", output_precision="fp16", input_range=None, weight_ranges=None
        )

    def channels_made(self, read: Sequence[int]) -> int:
        """Those of its weight."""
        _expect_equal(self.name, [*read, self.in_channels])
        return self.out_channels


@dataclass(frozen=True, eq=False, kw_only=True)
class Add(_Operation):
    """``y = x + other``; the ranges are those of its inputs and ``None`` in fp16."""

    kind: ClassVar[str] = "add"
    path: str
    x: str
    other: str
    y: str
    precision: str
    output_precision: str
    range_x: float | None
    range_other: float | None
    name: str = ""

    @property
    def stated_ranges(self) -> Mapping[str, float]:
        """Of its operands."""
        given = {self.x: self.range_x, self.other: self.range_other}
        said = given if self.precision == "int8" else {}
        return {name: amax for name, amax in said.items() if amax is not None}

    def in_floats(self) -> Self:
        """As it is in fp16."""
        return replace(
            self, precision="fp16", output_precision="fp16", range_x=None, range_other=None
        )

    def channels_made(self, read: Sequence[int]) -> int:
        """As many as it reads."""
        _expect_equal(self.name, read)
        return read[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class Relu(_Operation):
    """``y = max(x, 0)``, only behind an `Add`."""

    kind: ClassVar[str] = "relu"
    path: str
    x: str
    y: str
    name: str = ""

    def channels_made(self, read: Sequence[int]) -> int:
        """As many as it reads."""
        return read[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class Concat(_Operation):
    """Channels of tensors on the same voxels side by side; libspconv has no such operator.

    Attributes:
        path: Module of the exported model.
        xs: Tensors read, in order.
        y: Tensor made.
        precision: ``"int8"`` or ``"fp16"``.
        output_precision: How `y` is held.
        input_range: amax of all of them and of y; ``None`` in fp16.
        name: Name of the node.
    """

    kind: ClassVar[str] = "concat"
    path: str
    xs: tuple[str, ...]
    y: str
    precision: str
    output_precision: str
    input_range: float | None
    name: str = ""

    @property
    def stated_ranges(self) -> Mapping[str, float]:
        """One for all that it reads and makes."""
        said = self.input_range
        return {} if said is None else dict.fromkeys((*self.xs, self.y), said)

    def in_floats(self) -> Self:
        """As it is in fp16."""
        return replace(self, precision="fp16", output_precision="fp16", input_range=None)

    def channels_made(self, read: Sequence[int]) -> int:
        """All that it reads."""
        return sum(read)


@dataclass(frozen=True, eq=False, kw_only=True)
class Fold(_Operation):
    """``y[n, c] = Σ_k x[n, c·K + k]`` in float, K channels of x to one of y; not in libspconv."""

    kind: ClassVar[str] = "fold"
    path: str
    x: str
    y: str
    channels: int
    output_precision: str
    name: str = ""

    def in_floats(self) -> Self:
        """Its result in fp16."""
        return replace(self, output_precision="fp16")

    def channels_made(self, read: Sequence[int]) -> int:
        """As it says, if what it reads divides by them."""
        if self.channels < 1 or read[0] % self.channels:
            raise ValueError(f"{self.name} folds {read[0]} channels into {self.channels}")
        return self.channels


@dataclass(frozen=True, eq=False, kw_only=True)
class Select(_Operation):
    """``y[n, k] = x[n, channels[k]]``; libspconv has no such operator.

    Attributes:
        path: Module of the exported model.
        x: Tensor read.
        y: Tensor made.
        channels: Of x, one for each of y, in order.
        in_channels: How many x has.
        activation: ``"ReLU"`` or ``"None"``.
        output_precision: How `y` is held.
        input_range: amax of x and of y where x is held in int8, else ``None``.
        name: Name of the node.
    """

    kind: ClassVar[str] = "select"
    path: str
    x: str
    y: str
    channels: Sizes
    in_channels: int
    activation: str
    output_precision: str
    input_range: float | None
    name: str = ""

    @property
    def stated_ranges(self) -> Mapping[str, float]:
        """One for what it reads and makes."""
        said = self.input_range
        return {} if said is None else dict.fromkeys((self.x, self.y), said)

    def in_floats(self) -> Self:
        """As it is in fp16."""
        return replace(self, output_precision="fp16", input_range=None)

    def channels_made(self, read: Sequence[int]) -> int:
        """As many as it takes, if what it reads has them."""
        _expect_equal(self.name, [*read, self.in_channels])
        if not all(0 <= channel < self.in_channels for channel in self.channels):
            raise ValueError(f"{self.name} takes {self.channels} of {self.in_channels} channels")
        return len(self.channels)


@dataclass(frozen=True, eq=False, kw_only=True)
class Pool(_Operation):
    """``y[o, c] = max x[i, c]`` over the voxels i of a window; libspconv has no such operator.

    Sizes are those of `Conv`; what is read is pooled in the form that it is held in.
    """

    kind: ClassVar[str] = "pool"
    path: str
    x: str
    y: str
    kernel_size: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    subm: bool
    rulebook: str
    input_spatial_shape: Sizes
    output_spatial_shape: Sizes
    output_precision: str
    input_range: float | None
    name: str = ""
    inverse: ClassVar[bool] = False

    @property
    def stated_ranges(self) -> Mapping[str, float]:
        """One for what it reads and makes."""
        said = self.input_range
        return {} if said is None else dict.fromkeys((self.x, self.y), said)

    def in_floats(self) -> Self:
        """As it is in fp16."""
        return replace(self, output_precision="fp16", input_range=None)

    def channels_made(self, read: Sequence[int]) -> int:
        """As many as it reads."""
        return read[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class Steps(_Operation):
    """What a model computes between its layers, as a function of standard operators.

    libspconv has no such thing. `body` is an ``onnx.FunctionProto``: it takes the features of `xs`
    (float32), the voxels of `places` (int64 ``[voxels, 4]``) and the number of frames (int64
    ``[1]``), and makes the features of y and, where y lies on voxels of its own, these (int32).

    Attributes:
        path: Module of the exported model.
        xs: Tensors whose features it reads.
        ranges: amax of those that it reads as integers, else 0.
        places: Tensors whose voxels it reads.
        on: Which of all these lies on the voxels of y; −1 where `grid` is y's own, or none does.
        y: Tensor made.
        grid: Spatial shape of voxels that it makes; empty where it makes none.
        channels: Of y.
        frames: How many it is for, where it computes with their number; else 0.
        body: The function, serialized.
        output_precision: How `y` is held.
        name: Name of the node.
    """

    kind: ClassVar[str] = "steps"
    path: str
    xs: tuple[str, ...]
    ranges: tuple[float, ...]
    places: tuple[str, ...]
    on: int
    y: str
    grid: Sizes
    channels: int
    frames: int
    body: bytes
    output_precision: str
    name: str = ""

    @property
    def stated_ranges(self) -> Mapping[str, float]:
        """Of what it reads as integers."""
        return {x: amax for x, amax in zip(self.xs, self.ranges, strict=True) if amax}

    def in_floats(self) -> Self:
        """As it is in fp16."""
        return replace(self, output_precision="fp16", ranges=(0.0,) * len(self.xs))

    def channels_made(self, read: Sequence[int]) -> int:
        """As it says."""
        return self.channels


@dataclass(frozen=True, eq=False, kw_only=True)
class Scatter(_Operation):
    """Voxels to a dense grid ``output_shape``: batch, channels, then the axes as `format` says."""

    kind: ClassVar[str] = "scatter"
    path: str
    x: str
    y: str
    input_spatial_shape: Sizes
    format: str
    output_shape: Sizes
    name: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Move(_Operation):
    """``"Transpose"`` (`dims` is the permutation) or ``"Reshape"`` (`dims` is the new shape)."""

    path: str
    op: str
    x: str
    y: str
    dims: Sizes
    name: str = ""

    @property
    def kind(self) -> str:  # type: ignore[override]
        """Its operator's."""
        return self.op.lower()


Node = Conv | Add | Relu | Concat | Fold | Select | Pool | Steps | Scatter | Move


@dataclass(frozen=True, eq=False, kw_only=True)
class Graph:
    """Nodes in order of execution.

    Attributes:
        input: Tensor of the voxels' features.
        channels: Its channels.
        nodes: In order.
        outputs: Tensors that the file returns.
        shapes: Shape of each output in the example, batch 1; placeholders for voxels.
        weights: How its portable form stores integer weights: ``"int8"``; ``"uint8"`` with zero
            point 128 where int8 would saturate on some CPU (`stored_weights`); ``"all uint8"``, as
            files once did, where a file does not say.
        bounded: Whether more voxels than a layer's `output_bound` are refused, as an engine drops
            them; a portable file takes any number.
    """

    input: str
    channels: int
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    shapes: Mapping[str, Sizes] = field(default_factory=dict)
    weights: str = "uint8"
    bounded: bool = True


def inputs_of(node: Node) -> tuple[str, ...]:
    """Tensors that a node reads."""
    if isinstance(node, Concat | Steps):
        return node.xs if isinstance(node, Concat) else (*node.xs, *node.places)
    return (node.x, node.other) if isinstance(node, Add) else (node.x,)


def first_on_input(graph: Graph) -> Conv | Pool | None:
    """The first convolution or pooling on the input's voxels that says their grid."""
    given = {graph.input}
    for node in graph.nodes:
        if not given.intersection(inputs_of(node)):
            continue
        if isinstance(node, Conv | Pool) and node.input_spatial_shape:
            return node
        if not isinstance(node, Steps) or (node.on >= 0 and inputs_of(node)[node.on] in given):
            given.add(node.y)
    return None


def renamed(node: Node, names: Mapping[str, str], name: str) -> Node:
    """The node under another name, its tensors under those that `names` gives them."""
    if isinstance(node, Concat):
        return replace(node, xs=tuple(names[x] for x in node.xs), y=names[node.y], name=name)
    if isinstance(node, Steps):
        xs, places = (tuple(names[x] for x in read) for read in (node.xs, node.places))
        return replace(node, xs=xs, places=places, y=names[node.y], name=name)
    made = replace(node, x=names[node.x], y=names[node.y], name=name)
    return replace(made, other=names[made.other]) if isinstance(made, Add) else made


def _expect_equal(name: str, channels: Sequence[int]) -> None:
    known = set(channels) - {0}
    if len(known) > 1:
        raise ValueError(f"{name} reads tensors of {sorted(known)} channels")
