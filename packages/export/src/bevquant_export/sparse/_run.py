"""Runs a graph, node by node, in integers or in floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from bevquant_export.sparse._axes import refuse_more
from bevquant_export.sparse._channel_permutations import permutes_channels
from bevquant_export.sparse._graph import (
    Add,
    Concat,
    Conv,
    Fold,
    Graph,
    LayoutOp,
    Node,
    Pool,
    Scatter,
    Steps,
)
from bevquant_export.sparse._steps import run_body
from bevquant_export.sparse._walk import Accumulators, Floats, GraphWalk, Integers, State, Sum
from bevquant_export.voxels._window import Sizes
from bevquant_int8sim import (
    SparseOutput,
    dequantize,
    int8_add,
    int8_sparse_conv,
    plan_rulebook,
    quantize,
    requantize,
)
from bevquant_int8sim.model import Coords
from bevquant_sparse import Rulebook, WeightLayout, sparse_conv, sparse_max_pool, to_dense

_STEPS = 127
# A node, the scale of its integers (None for floats), its values and the coordinates of the rows.
See = Callable[[Node, float | None, Callable[[], Tensor], Tensor | None], None]


class FrameRun(GraphWalk[Tensor, Coords]):
    """One call, on kernels of ``bevquant_int8sim``; `see` is called with every node's result."""

    def __init__(self, graph: Graph, backend: str, see: See) -> None:
        super().__init__(graph)
        self.backend, self.see = backend, see
        windows = (node for node in graph.nodes if isinstance(node, Conv | Pool))
        self._strided = {w.rulebook for w in windows if w.rulebook and not (w.subm or w.inverse)}
        self._distinct: list[Coords] = []

    def run(self, features: Tensor, voxels: Coords) -> tuple[Tensor | SparseOutput, ...]:
        """Outputs of the graph."""
        self.states[self.graph.input] = Floats(name=self.graph.input, tensor=features)
        self.voxels[self.graph.input] = voxels
        self.walk()
        return tuple(self._output(name) for name in self.graph.outputs)

    def _output(self, name: str) -> Tensor | SparseOutput:
        values = self.floats(self.states[name])
        voxels = self.voxels.get(name)
        if voxels is None:
            return values
        shape = list(voxels.spatial_shape)
        return SparseOutput(values, voxels.indices, shape, voxels.batch_size)

    def _done(self, node: Node) -> None:
        state, voxels = self.states[node.y], self.voxels.get(node.y)
        indices = None if voxels is None else voxels.indices
        if isinstance(state, Integers):
            self.see(node, state.amax / _STEPS, lambda: state.tensor, indices)
        else:
            self.see(node, None, partial(self.floats, state), indices)

    # Forms of a tensor

    def _as_floats(self, state: State[Tensor]) -> Tensor:
        if isinstance(state, Sum):
            total = state.a.double() * (state.range_a / _STEPS)
            total += state.b.double() * (state.range_b / _STEPS)
            return (total.clamp_(min=0) if state.relu else total).float()
        if isinstance(state, Accumulators):
            values = dequantize(state.sums, _scale(state), axis=-1)
            return values.clamp_(min=0) if state.relu else values
        assert isinstance(state, Integers)
        return self._values_of(state, state.tensor, state.amax)

    def _as_integers(self, state: State[Tensor], amax: float, reader: str) -> Tensor:
        scale = amax / _STEPS
        if isinstance(state, Floats):
            return quantize(state.tensor, scale, name=reader)
        if isinstance(state, Integers):
            return requantize(state.tensor.int(), state.amax / _STEPS / scale, name=reader)
        relu = state.relu
        if isinstance(state, Accumulators):
            return requantize(state.sums, _scale(state) / scale, axis=-1, relu=relu, name=reader)
        scale_a, scale_b = state.range_a / _STEPS, state.range_b / _STEPS
        if scale_a == scale_b:
            return requantize(
                state.a.int() + state.b.int(), scale_a / scale, relu=relu, name=reader
            )
        return int8_add(state.a, state.b, scale_a / scale, scale_b / scale, relu=relu, name=reader)

    def _values_of(self, state: State[Tensor], q: Tensor, amax: float) -> Tensor:
        return dequantize(q, amax / _STEPS)

    # Nodes

    def _apart(self, one: Coords, other: Coords) -> str:
        same = one is other or torch.equal(one.indices, other.indices)
        return "" if same else f" ({len(one.indices)} and {len(other.indices)})"

    def _neighbours(self, node: Conv | Pool) -> tuple[Rulebook, Coords]:
        coords, geometry = self.on_voxels(node, node.x), node.geometry
        if node.inverse and node.rulebook not in self._strided:
            raise ValueError(
                f"{node.name}: nothing to invert: no strided convolution has the rulebook "
                f"{node.rulebook!r}"
            )
        if geometry.keeps_rows and coords not in self._distinct:
            self._check(coords, node.name)
        rulebook, made = coords.convolved(geometry, node.rulebook or None, node.name)
        if self.graph.bounded and isinstance(node, Conv):
            refuse_more(made, node)
        return rulebook, made

    def _check(self, coords: Coords, reader: str) -> None:
        """Refuse repeated voxels and those outside of the grid, as larger kernels do."""
        try:
            plan_rulebook(
                coords.indices, coords.spatial_shape, 1, subm=True, batch_size=coords.batch_size
            )
        except ValueError as error:
            raise ValueError(f"{reader}: {error}") from error
        self._distinct.append(coords)

    def _convolved(
        self, node: Conv, x: Tensor, rows: Rulebook, amax: float | None
    ) -> State[Tensor]:
        relu, layout = node.activation == "ReLU", WeightLayout.KRSC
        if amax is None:
            weight, bias = node.floats
            if permutes_channels(node):  # as the model's torch.mm; products are rounded separately
                out = torch.mm(x, weight.flatten(1).t()) + bias
            else:
                out = sparse_conv(x, weight, bias, rows, layout=layout)
            return self._made(node, out.clamp_(min=0) if relu else out)
        target = self.ranges.get(node.y)
        ranges = torch.tensor(node.weight_ranges, dtype=torch.float64)
        scale_x, scale_w = node.scales
        out = int8_sparse_conv(
            x,
            *node.integers,
            rows,
            layout=layout,
            multiplier=None if target is None else scale_w * scale_x / (target / _STEPS),
            relu=relu and target is not None,
            backend=self.backend,
            name=node.name,
        )
        if target is not None:
            return self._made(node, out, target)
        return Accumulators(
            name=node.name, sums=out, weight_ranges=ranges, input_range=amax, relu=relu
        )

    def _pooled(self, node: Pool, x: Tensor, rows: Rulebook, integers: bool) -> Tensor:
        return sparse_max_pool(x.float(), rows).to(x.dtype)

    def _added(self, node: Add, x: Tensor, other: Tensor) -> Tensor:
        return x + other

    def _rectified(self, x: Tensor, name: str, path: str) -> Tensor:
        return x.clamp(min=0)

    _rectified_integers = _rectified

    def _joined(self, node: Concat, read: list[Tensor]) -> Tensor:
        return torch.cat(read, 1)

    def _folded(self, node: Fold, x: Tensor) -> Tensor:
        return x.reshape(len(x), node.channels, x.shape[1] // node.channels).sum(2)

    def _taken(self, tensor: Tensor, channels: Sizes, name: str, path: str, axis: int) -> Tensor:
        return tensor.index_select(axis, torch.tensor(channels, device=tensor.device))

    def _called(self, node: Steps, read: list[Tensor], places: Sequence[Coords]) -> Tensor:
        frames = self.voxels[self.graph.input].batch_size
        if node.frames not in (0, frames):
            raise ValueError(
                f"{node.name}: {frames} frames; the model computes with the number of frames of "
                f"the example, {node.frames}"
            )
        inputs = [*read, *(voxels.indices.long() for voxels in places), torch.tensor([frames])]
        made = run_body(node.body, inputs, made=1 + bool(node.grid))
        if node.grid:
            self.voxels[node.y] = Coords(made[1], node.grid, frames)
        return made[0]

    def _scattered(self, node: Scatter, x: Tensor, voxels: Coords) -> Tensor:
        return to_dense(x, voxels.indices, voxels.spatial_shape, voxels.batch_size)

    def _laid_out(self, node: LayoutOp, x: Tensor) -> Tensor:
        turns = node.op == "Transpose"
        return x.permute(node.dims) if turns else x.reshape(x.shape[0], *node.dims[1:])


def _scale(state: Accumulators[Tensor]) -> Tensor:
    """float64 ``[channels]``."""
    return state.weight_ranges / _STEPS * (state.input_range / _STEPS)
