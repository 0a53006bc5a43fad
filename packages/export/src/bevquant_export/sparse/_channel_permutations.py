r"""Channels that are concatenated, selected and summed, as operators that libspconv has.

A submanifold convolution of kernel 1×1×1 copies channels. With weights of 0 and 1,

.. math:: \operatorname{cat}(x_1, …, x_n) = \sum_i x_i P_i, \qquad
          \sum_k x[\,\cdot, c K + k] = x F, \quad F[c K + k, c] = 1

where the columns of all :math:`P_i` together hold one 1 each. In a concatenation all terms of a sum
but one are zero, so nothing is rounded: a weight of 1 is 64 steps of 1/64, and
``round(64·q · (s/64)/s)`` is q in any arithmetic. Selected channels of a convolution are a
convolution with that part of its weight. This costs nothing, and each part keeps its own range.

The channels that a value holds (`Selections`) are found by running the layout operators themselves
(slices, chunks, shuffles) on numbers that encode each value's position, for two numbers of voxels.
Where rows of the result are the original voxels and both runs agree on the columns, the result is a
selection of channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx

from bevquant_export.sparse._graph import (
    Add,
    Concat,
    Conv,
    Fold,
    Graph,
    Node,
    Pool,
    Relu,
    Select,
    Steps,
    first_on_input,
)
from bevquant_export.voxels._window import Sizes
from bevquant_int8sim import IntegerModel
from bevquant_int8sim.model import Step

_RANGE = 127 / 64  # of weights: 1.0 is 64 steps
_ROWS = (5, 11)
_ERRORS = (RuntimeError, IndexError, TypeError, ValueError, KeyError)


class Selections:
    """Values that hold channels of another value; `constants` of the program may grow."""

    def __init__(self, model: IntegerModel, constants: dict[str, Tensor]) -> None:
        self.source, self.constants = model.source, constants
        self.makers = {name: step for step in model.program.steps for name in step.outputs}
        self._of: dict[str, tuple[str, int, tuple[Any, ...]]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._of

    def follow(self, step: Step) -> bool:
        """Record a layout operator's result; return whether voxels keep their rows."""
        name = getattr(step.args[0], "name", "") if step.args else ""
        if name in self._of:
            base, width, numbers = self._of[name]
        else:
            base, width = name, self._width(step)
            numbers = tuple(torch.arange(n * width).reshape(n, width) for n in _ROWS)
        if not width:
            return False
        try:
            made = tuple(
                self._moved(step, probe, rows) for probe, rows in zip(numbers, _ROWS, strict=True)
            )
        except _ERRORS:
            return False
        if isinstance(made[0], Tensor) and _columns(made, width) is None:
            return False
        self._of[step.outputs[0]] = base, width, made
        return True

    def channels(self, name: str) -> tuple[str, int, Tensor]:
        """The value that holds the channels, their number and indices (any shape after rows)."""
        base, width, numbers = self._of[name]
        columns = _columns(numbers, width)
        assert columns is not None
        return base, width, columns

    def is_matrix(self, name: str) -> bool:
        """Whether it is ``[voxels, channels]``."""
        first = self._of[name][2][0] if name in self._of else None
        return isinstance(first, Tensor) and first.dim() == 2

    def _moved(self, step: Step, numbers: Any, rows: int) -> Any:
        """Result of the layout operator on a probe."""

        def read(argument: Any) -> Any:
            name = getattr(argument, "name", None)
            if not isinstance(name, str):
                return argument
            return rows if self._counts_rows(name) else self.constants[name]

        args: Any = fx.node.map_aggregate(step.args[1:], read)
        kwargs: Any = fx.node.map_aggregate(dict(step.kwargs), read)
        function: Any = step.target
        return function(numbers, *args, **kwargs)

    def _counts_rows(self, name: str) -> bool:
        step = self.makers.get(name)
        return step is not None and step.called == "size" and step.args[1:] == (0,)

    def _width(self, step: Step) -> int:
        """Channels of the operator's input; 0 where unknown."""
        held = {} if self.source is None else self.source.held
        node = next((n for n, forms in held.items() if step.outputs[0] in forms.values()), None)
        before = node.args[0] if node is not None and node.args else None
        shape: Any = before.meta["val"].shape if isinstance(before, fx.Node) else ()
        if len(shape) != 2:
            return 0
        # An open size is that of the example: a file has one number of channels.
        width = getattr(getattr(shape[1], "node", None), "hint", shape[1])
        return int(width or 0)


def _columns(numbers: tuple[Tensor, ...], width: int) -> Tensor | None:
    """Column of the original at each position after the rows; None where rows differ."""
    found = []
    for made, rows in zip(numbers, _ROWS, strict=True):
        if made.dim() < 1 or made.shape[0] != rows:
            return None
        first = torch.arange(rows).reshape(-1, *(1,) * (made.dim() - 1)) * width
        columns = made - first
        if not bool((columns == columns[:1]).all()) or not bool(
            (made // width * width == first).all()
        ):
            return None
        found.append(columns[0])
    same = found[0].shape == found[1].shape and torch.equal(*found)
    return found[0] if same else None


PERMUTED = " (channels)"  # suffix of paths of other tensors than layers'


@dataclass(frozen=True)
class _Voxels:
    """A set of voxels: the node that created it, its grid, and sizes that a file states."""

    maker: str
    grid: Sizes
    bound: int
    rows: int


def permutes_channels(node: Node) -> bool:
    """Whether a node was written for a channel operation, not for a layer of the model."""
    return node.path.endswith(PERMUTED)


def row_conv(
    path: str,
    x: str,
    y: str,
    weight: Tensor,
    bias: Tensor | None,
    weight_ranges: tuple[float, ...] | None,
    *,
    input_range: float | None,
    output_bound: int = 0,
) -> Conv:
    """``y = x weightᵀ + bias`` by rows, in fp16; `with_channel_permutations` adds its voxels."""
    one, nothing = (1, 1, 1), (0, 0, 0)
    return Conv(
        path=path, x=x, y=y, weight=weight.reshape(len(weight), *one, -1),
        bias=torch.zeros(len(weight), dtype=torch.float16) if bias is None else bias,
        kernel_size=one, stride=one, padding=nothing, dilation=one, output_padding=nothing,
        subm=True, inverse=False, rulebook="", activation="None",
        precision="fp16", output_precision="fp16", input_range=input_range,
        weight_ranges=weight_ranges, output_bound=output_bound,
        input_spatial_shape=(), output_spatial_shape=(), rows=(0, 0),
    )  # fmt: skip


def with_channel_permutations(graph: Graph, *, joins: bool) -> Graph:
    """Return `graph` with the voxels of every 1×1×1 convolution on rows.

    With `joins`, every `Concat`, `Fold` and `Select` becomes such convolutions and additions.
    """
    return _Writer(graph, joins=joins).run()


class _Writer:
    def __init__(self, graph: Graph, *, joins: bool) -> None:
        self.graph, self.joins = graph, joins
        self.channels = {graph.input: graph.channels}
        self.voxels: dict[str, _Voxels] = {}
        self.undone: dict[str, _Voxels] = {}  # rulebook to the input of its strided convolution
        self.keys: dict[
            str, str
        ] = {}  # producer of voxels to the rulebook of channel copies on them
        self.used = {node.rulebook for node in graph.nodes if isinstance(node, Conv)}
        self.convs: dict[str, Conv] = {}  # outputs of convolutions
        self.parted: set[str] = set()  # tensors that are written in parts alone
        first = first_on_input(graph)
        if first is not None:
            conv = first if isinstance(first, Conv) else None
            bound = conv.output_bound if conv is not None and conv.subm else 0
            rows = 0 if conv is None else conv.rows[0]
            made = _Voxels(graph.input, first.input_spatial_shape, bound, rows)
            self.voxels[graph.input] = made

    def run(self) -> Graph:
        nodes: list[Node] = []
        for node in self.graph.nodes:
            if isinstance(node, Conv) and not node.input_spatial_shape:
                node = self._placed(node)
            if isinstance(node, Conv):
                self.convs[node.y] = node = self._whole(node) if self.joins else node
            if isinstance(node, Concat) and self.joins:
                nodes += self._concatenation(node)
            elif isinstance(node, Fold) and self.joins:
                nodes.append(self._folded(node))
            elif isinstance(node, Select) and self.joins:
                nodes.append(self._selected(node))
            elif self.joins and self._in_parts(node):
                self.parted.add(node.y)
            else:
                nodes.append(node)
            self._note(node)
        return replace(self.graph, nodes=tuple(nodes))

    def _whole(self, node: Conv) -> Conv:
        """The convolution for consumers of all channels; int8 where all of them need int8."""
        readers = [other for other in self.graph.nodes if node.y in other.inputs]
        others = [n for n in readers if not isinstance(n, Select) or n.input_range is not None]
        integers = [node.y in n.stated_ranges and not isinstance(n, Add) for n in others]
        taken = len(others) < len(readers) and node.y not in self.graph.outputs
        holds = taken and node.precision == "int8" and bool(others) and all(integers)
        return replace(node, output_precision="int8") if holds else node

    def _in_parts(self, node: Node) -> bool:
        """Whether all consumers of a convolution read a part of it, which replaces it."""
        if not isinstance(node, Conv) or node.y in self.graph.outputs:
            return False
        parts = [isinstance(n, Select) for n in self.graph.nodes if node.y in n.inputs]
        return bool(parts) and all(parts)

    def _note(self, node: Node) -> None:
        """Channels and voxels of a node's result."""
        if node.on_voxels:
            read = [self.channels.get(x, 0) for x in node.inputs]
            self.channels[node.y] = node.channels_made(read)
        if isinstance(node, Conv):
            before = self.voxels.get(node.x)
            made = _Voxels(node.y, node.output_spatial_shape, node.output_bound, node.rows[1])
            if node.subm:
                made = before or made
            elif node.inverse:
                made = self.undone.get(node.rulebook, made)
            elif node.rulebook:
                own = _Voxels(node.x, node.input_spatial_shape, node.output_bound, node.rows[0])
                self.undone[node.rulebook] = before or own
            self.voxels[node.y] = made
        elif isinstance(node, Pool):
            self.voxels[node.y] = _Voxels(node.y, node.output_spatial_shape, 0, 0)
        elif isinstance(node, Steps) and node.grid:
            self.voxels[node.y] = _Voxels(node.y, node.grid, 0, 0)
        elif isinstance(node, Add | Relu | Concat | Fold | Select | Steps):
            if isinstance(node, Steps) and node.on < 0:
                return
            first = node.inputs[node.on if isinstance(node, Steps) else 0]
            if first in self.voxels:
                self.voxels[node.y] = self.voxels[first]

    def _concatenation(self, node: Concat) -> Iterator[Node]:
        widths = [self.channels[x] for x in node.xs]
        total, first, summed = sum(widths), 0, ""
        for number, (x, width) in enumerate(zip(node.xs, widths, strict=True)):
            places = torch.zeros(total, width)
            places[first + torch.arange(width), torch.arange(width)] = 1
            first += width
            alone = len(node.xs) == 1
            made = node.y if alone else f"{node.y} part {number}"
            held = node.output_precision if alone else node.precision
            yield self._layout_op(node, x, made, places, held)
            if number:
                last = number == len(node.xs) - 1
                y = node.y if last else f"{node.y} sum {number}"
                yield Add(
                    path=node.path + PERMUTED, x=summed, other=made, y=y, precision=node.precision,
                    output_precision=node.output_precision if last else node.precision,
                    range_x=node.input_range, range_other=node.input_range,
                )  # fmt: skip
                made = y
            summed = made

    def _folded(self, node: Fold) -> Conv:
        width = self.channels[node.x]
        places = torch.zeros(node.channels, width)
        places[torch.arange(width) // (width // node.channels), torch.arange(width)] = 1
        return self._layout_op(node, node.x, node.y, places, node.output_precision)

    def _selected(self, node: Select) -> Conv:
        """A part of the producing convolution, else a permutation of channels."""
        maker = self.convs.get(node.x)
        if maker is not None and (node.x in self.parted or node.input_range is None):
            return self._part(maker, node)
        places = torch.zeros(len(node.channels), node.in_channels)
        places[torch.arange(len(places)), torch.tensor(node.channels)] = 1
        copied = self._layout_op(node, node.x, node.y, places, node.output_precision)
        return replace(copied, activation=node.activation)

    def _part(self, conv: Conv, node: Select) -> Conv:
        """Some output channels of a convolution; all its parts have one rulebook."""
        if not conv.rulebook:
            conv = self.convs[conv.y] = replace(conv, rulebook=self._free_key("parts"))
        ranges, channels = conv.weight_ranges, list(node.channels)
        return replace(
            conv,
            path=conv.path.removesuffix(PERMUTED) + PERMUTED,
            y=node.y,
            weight=conv.weight[channels].contiguous(),
            bias=conv.bias[channels].contiguous(),
            weight_ranges=None if ranges is None else tuple(ranges[c] for c in channels),
            activation="ReLU" if "ReLU" in (conv.activation, node.activation) else "None",
            output_precision=node.output_precision,
        )

    def _layout_op(
        self, node: Concat | Fold | Select, x: str, y: str, places: Tensor, held: str
    ) -> Conv:
        """``y = x placesᵀ``; ``places`` is ``[out_channels, in_channels]``."""
        amax = None if isinstance(node, Fold) else node.input_range
        ranges = (_RANGE,) * len(places) if amax or held == "int8" else None
        copied = row_conv(node.path + PERMUTED, x, y, places.half(), None, ranges, input_range=amax)
        precision = "fp16" if amax is None else "int8"
        return self._placed(replace(copied, precision=precision, output_precision=held))

    def _placed(self, node: Conv) -> Conv:
        """The node with the voxels of its input."""
        voxels = self.voxels.get(node.x)
        bound = 0 if voxels is None else voxels.bound or node.output_bound
        if voxels is None or not bound:
            raise ValueError(
                f"export_sparse_onnx: {node.path.removesuffix(PERMUTED) or 'the forward'} works on "
                "the rows of the input features, which no submanifold convolution reads: nothing "
                "says how many voxels there are and on which grid. Do that before the model"
            )
        return replace(
            node, rulebook=self._key(voxels.maker), output_bound=bound,
            input_spatial_shape=voxels.grid, output_spatial_shape=voxels.grid,
            rows=(voxels.rows, voxels.rows),
        )  # fmt: skip

    def _key(self, maker: str) -> str:
        if maker not in self.keys:
            self.keys[maker] = self._free_key("channels")
        return self.keys[maker]

    def _free_key(self, stem: str) -> str:
        key = next(key for key in (f"{stem}{n}" for n in count(1)) if key not in self.used)
        self.used.add(key)
        return key
