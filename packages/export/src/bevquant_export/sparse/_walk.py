"""A graph node by node, in integers or in floats: the part that a run and a written form share.

`FrameRun` computes tensors, ``_lower`` writes operators. Each consumer reads a tensor in
the form that it needs, whatever the stored form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

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
)
from bevquant_export.voxels._window import Sizes

T = TypeVar("T")  # a tensor
V = TypeVar("V")  # a set of voxels


@dataclass(frozen=True, eq=False, kw_only=True)
class _State(Generic[T]):
    """Common part of the forms."""

    name: str  # Node that made the tensor
    path: str = ""  # Its module
    made: dict[object, T] = field(default_factory=dict)  # Forms that were computed from it


@dataclass(frozen=True, eq=False, kw_only=True)
class Floats(_State[T]):
    """float32 values."""

    tensor: T


@dataclass(frozen=True, eq=False, kw_only=True)
class Integers(_State[T]):
    """int8 of the scale amax/127; uint8 with zero point 128 in a portable file."""

    tensor: T
    amax: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Accumulators(_State[T]):
    """int32 sums of a convolution whose output is fp16: each consumer rounds them once."""

    sums: T  # ``[rows, channels]``
    weight_ranges: T  # amax per channel
    input_range: float  # amax of the convolution's input
    relu: bool  # Whether a ReLU follows


@dataclass(frozen=True, eq=False, kw_only=True)
class Sum(_State[T]):
    """The sum of two int8 tensors with their ranges, before it is rounded."""

    a: T
    b: T
    range_a: float
    range_b: float
    relu: bool = False


State = Floats[T] | Integers[T] | Accumulators[T] | Sum[T]


class GraphWalk(ABC, Generic[T, V]):
    """The tensors of a graph so far, and their voxels; `ranges` has the amax of int8 tensors."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.ranges = graph, tensor_ranges(graph)
        self.states: dict[str, State[T]] = {}
        self.voxels: dict[str, V] = {}
        self._before_relu = {node.x for node in graph.nodes if isinstance(node, Relu)}

    def walk(self) -> None:
        """All nodes; a state is dropped after its last consumer."""
        last = {name: i for i, node in enumerate(self.graph.nodes) for name in node.inputs}
        for number, node in enumerate(self.graph.nodes):
            kind = "layout_op" if isinstance(node, LayoutOp) else node.kind
            made: State[T] = getattr(self, f"_{kind}")(node)
            # A sum in front of a Relu is rounded once, after the Relu.
            summed = isinstance(node, Add) and node.y in self._before_relu
            self.states[node.y] = made if summed else self._stored(made, node)
            self._done(node)
            for name in set(node.inputs):
                if last[name] == number and name not in self.graph.outputs:
                    del self.states[name]

    def _stored(self, made: State[T], node: Node) -> State[T]:
        """The tensor in its stored form."""
        amax = self.ranges.get(node.y)
        if amax is None:
            return made
        q = self._integers(made, amax, node.name)
        return Integers(name=node.name, path=node.path, tensor=q, amax=amax)

    # Forms of a tensor

    def floats(self, state: State[T]) -> T:
        """float32 values."""
        if isinstance(state, Floats):
            return state.tensor
        if "float" not in state.made:
            state.made["float"] = self._as_floats(state)
        return state.made["float"]

    def _integers(self, state: State[T], amax: float, reader: str) -> T:
        """Integers of a range for a consumer."""
        if isinstance(state, Integers) and amax == state.amax:
            return state.tensor
        if amax not in state.made:
            state.made[amax] = self._as_integers(state, amax, reader)
        return state.made[amax]

    def _read(self, node: Node, name: str, amax: float | None) -> T:
        """A tensor as a node reads it: integers of a range, or floats."""
        if amax is None:
            return self.floats(self.states[name])
        return self._integers(self.states[name], amax, node.name)

    def _values(self, node: Node, name: str, amax: float) -> T:
        """float32 values; with a range those of its integers."""
        state = self.states[name]
        if not amax:
            return self.floats(state)
        if ("float", amax) not in state.made:
            q = self._integers(state, amax, node.name)
            state.made["float", amax] = self._values_of(state, q, amax)
        return state.made["float", amax]

    # Values of integers, accumulators or a sum
    @abstractmethod
    def _as_floats(self, state: State[T]) -> T: ...

    # Rounded once, to the scale amax/127
    @abstractmethod
    def _as_integers(self, state: State[T], amax: float, reader: str) -> T: ...

    # Values of the integers of a state
    @abstractmethod
    def _values_of(self, state: State[T], q: T, amax: float) -> T: ...

    # Nodes

    def _made(self, node: Node, tensor: T, amax: float | None = None) -> State[T]:
        if amax is None:
            return Floats(name=node.name, path=node.path, tensor=tensor)
        return Integers(name=node.name, path=node.path, tensor=tensor, amax=amax)

    def on_voxels(self, node: Node, *names: str) -> V:
        """The voxels that all of these tensors are on."""
        for name in names:
            if name not in self.voxels:
                raise ValueError(f"{node.name} reads {name!r}, a dense grid; it works on voxels")
        first, *others = (self.voxels[name] for name in names)
        for other in others:
            if apart := self._apart(first, other):
                raise ValueError(f"{node.name}: its operands lie on different voxels{apart}")
        return first

    def _conv(self, node: Conv) -> State[T]:
        rows, self.voxels[node.y] = self._neighbours(node)
        amax = node.input_range if node.precision == "int8" else None
        x = self._read(node, node.x, amax)
        return self._convolved(node, x, rows, amax)

    def _add(self, node: Add) -> State[T]:
        self.voxels[node.y] = self.on_voxels(node, node.x, node.other)
        range_x, range_other = node.range_x, node.range_other
        if node.precision != "int8" or range_x is None or range_other is None:
            range_x = range_other = None
        x = self._read(node, node.x, range_x)
        other = self._read(node, node.other, range_other)
        if range_x is None or range_other is None:
            return self._made(node, self._added(node, x, other))
        return Sum(
            name=node.name, path=node.path, a=x, b=other, range_a=range_x, range_b=range_other
        )

    def _relu(self, node: Relu) -> State[T]:
        self.voxels[node.y] = self.on_voxels(node, node.x)
        summed = self.states[node.x]
        if isinstance(summed, Sum):
            return replace(summed, relu=True, name=node.name, path=node.path, made={})
        return self._made(node, self._rectified(self.floats(summed), node.name, node.path))

    def _concat(self, node: Concat) -> State[T]:
        self.voxels[node.y] = self.on_voxels(node, *node.xs)
        read = [self._read(node, x, node.input_range) for x in node.xs]
        return self._made(node, self._joined(node, read), node.input_range)

    def _fold(self, node: Fold) -> State[T]:
        self.voxels[node.y] = self.on_voxels(node, node.x)
        return self._made(node, self._folded(node, self.floats(self.states[node.x])))

    def _pool(self, node: Pool) -> State[T]:
        rows, self.voxels[node.y] = self._neighbours(node)
        x = self._read(node, node.x, node.input_range)
        pooled = self._pooled(node, x, rows, node.input_range is not None)
        return self._made(node, pooled, node.input_range)

    def _select(self, node: Select) -> State[T]:
        self.voxels[node.y] = self.on_voxels(node, node.x)
        state, name, relu = self.states[node.x], node.name, node.activation == "ReLU"

        def taken(tensor: T, part: str = "", axis: int = 1) -> T:
            return self._taken(tensor, node.channels, f"{name}{part}", state.path, axis)

        fresh: dict[str, Any] = {"name": name, "path": node.path, "made": {}}
        if isinstance(state, Accumulators):
            ranges = taken(state.weight_ranges, ".weight_ranges", 0)
            sums, relu = taken(state.sums), state.relu or relu
            return replace(state, weight_ranges=ranges, sums=sums, relu=relu, **fresh)
        if isinstance(state, Sum):
            a, b = taken(state.a, ".a"), taken(state.b, ".b")
            return replace(state, a=a, b=b, relu=state.relu or relu, **fresh)
        made = taken(state.tensor)
        if relu and isinstance(state, Floats):
            made = self._rectified(made, f"{name}.relu", "")
        elif relu:
            made = self._rectified_integers(made, f"{name}.relu", node.path)
        return replace(state, tensor=made, **fresh)

    def _steps(self, node: Steps) -> State[T]:
        read = [self._values(node, x, amax) for x, amax in zip(node.xs, node.ranges, strict=True)]
        made = self._called(node, read, [self.on_voxels(node, name) for name in node.places])
        if not node.grid and node.on >= 0:
            self.voxels[node.y] = self.on_voxels(node, node.inputs[node.on])
        return self._made(node, made)

    def _scatter(self, node: Scatter) -> State[T]:
        voxels = self.on_voxels(node, node.x)
        return self._made(node, self._scattered(node, self.floats(self.states[node.x]), voxels))

    def _layout_op(self, node: LayoutOp) -> State[T]:
        return self._made(node, self._laid_out(node, self.floats(self.states[node.x])))

    # Called after each node
    @abstractmethod
    def _done(self, node: Node) -> None: ...

    # The voxels in words if they differ; else empty
    @abstractmethod
    def _apart(self, one: V, other: V) -> str: ...

    # Rows that each output voxel reads, and the output voxels
    @abstractmethod
    def _neighbours(self, node: Conv | Pool) -> tuple[Any, V]: ...

    # A convolution with its ReLU; in float without `amax`, the range of its input
    @abstractmethod
    def _convolved(self, node: Conv, x: T, rows: Any, amax: float | None) -> State[T]: ...

    # The largest of each window
    @abstractmethod
    def _pooled(self, node: Pool, x: T, rows: Any, integers: bool) -> T: ...

    # The sum in float
    @abstractmethod
    def _added(self, node: Add, x: T, other: T) -> T: ...

    # max(x, 0) in float
    @abstractmethod
    def _rectified(self, x: T, name: str, path: str) -> T: ...

    # max(x, 0) of int8
    @abstractmethod
    def _rectified_integers(self, x: T, name: str, path: str) -> T: ...

    # Concatenated channels
    @abstractmethod
    def _joined(self, node: Concat, read: list[T]) -> T: ...

    # Sums over groups of channels
    @abstractmethod
    def _folded(self, node: Fold, x: T) -> T: ...

    # Entries of an axis
    @abstractmethod
    def _taken(self, tensor: T, channels: Sizes, name: str, path: str, axis: int) -> T: ...

    # Result of a function; new voxels are noted
    @abstractmethod
    def _called(self, node: Steps, read: list[T], places: Sequence[V]) -> T: ...

    # The dense grid
    @abstractmethod
    def _scattered(self, node: Scatter, x: T, voxels: V) -> T: ...

    # Transposed or reshaped
    @abstractmethod
    def _laid_out(self, node: LayoutOp, x: T) -> T: ...
