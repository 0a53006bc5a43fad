"""From the integers of a model to the graph of a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from bevquant_export._size_guards import sparse_guards
from bevquant_export.sparse._beginning import BEHIND_DENSE, refuse_rounded_coords
from bevquant_export.sparse._between import follow
from bevquant_export.sparse._channel_permutations import with_channel_permutations
from bevquant_export.sparse._check_graph import check_rulebooks
from bevquant_export.sparse._compare import frame_of
from bevquant_export.sparse._conv_node import ConvWriter, TensorForm, agreed_forms
from bevquant_export.sparse._follow import Draft, Followed, named
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
from bevquant_export.sparse._half_precision import check_half_values
from bevquant_export.sparse._observe import Seen, observe
from bevquant_export.sparse._steps import Bodies
from bevquant_export.voxels._window import AXES
from bevquant_int8sim import IntegerModel
from bevquant_int8sim import program as integer_program
from bevquant_int8sim.program import Step

_STEPS = 127
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def sparse_graph(
    rounded: nn.Module,
    integers: IntegerModel,
    example_inputs: Any,
    batches: Iterable[Any],
    order: str,
    head_room: float,
    *,
    dialect: str = "libspconv",
    fewer_axes: bool = True,
) -> Graph:
    """Graph of a file for a calibrated encoder's integers with rounded constants.

    Tensors of the graph are named as the program's values. `fewer_axes` says whether a convolution
    of fewer than three axes becomes one of three.
    """
    followed = follow(integers, extended=dialect == "portable")
    on_voxels = any(
        isinstance(step, integer_program.Coordinates | integer_program.SparseConv)
        for step in integers.program.steps
    )
    if not on_voxels and not integers.program.sparse_inputs:
        raise ValueError(
            "export_sparse_onnx: no layer of the model works on voxels, so that the grid is "
            "unknown: export_qdq_onnx writes models of maps and rows"
        )
    refuse_rounded_coords(integers.program)
    seen = observe(integers, example_inputs, batches)
    bodies = Bodies(integers, example_inputs, order)
    forms = agreed_forms(followed)
    if forms[followed.input].relu:
        raise ValueError(
            "export_sparse_onnx: a ReLU reads the input features; the dialect has it behind a "
            "convolution or an addition: apply it before the model"
        )
    fewest = 1 if fewer_axes else AXES
    writer = _NodeWriter(forms, seen, rounded, order, head_room, fewest, bodies)
    nodes = [node for draft in followed.drafts for node in writer.nodes(draft)]
    shapes = {r.tensor: (1, *seen[r.tensor].made[1:]) for r in followed.outputs if r.tensor in seen}
    graph = Graph(
        input=followed.input,
        channels=_channels(followed, nodes, bodies),
        nodes=tuple(nodes),
        outputs=tuple(dict.fromkeys(r.tensor for r in followed.outputs)),
        shapes=shapes,
        features=followed.features,
        guards=sparse_guards(
            integers.program, example_inputs, lambda: frame_of(integers, example_inputs)
        ),
    )
    graph = with_channel_permutations(graph, joins=dialect == "libspconv")
    check_rulebooks(graph)
    if dialect == "libspconv":  # portable files compute in float32
        check_half_values(graph, rounded, seen)
    return graph


def _channels(followed: Followed, nodes: list[Node], bodies: Bodies) -> int:
    for node in nodes:
        if isinstance(node, Conv | Select) and node.x == followed.input:
            return node.in_channels
        if isinstance(node, Pool | Steps) and followed.input in node.inputs:
            return int(bodies.source.shapes[followed.input][1])
    raise ValueError("export_sparse_onnx: no convolution reads the input features")


@dataclass(frozen=True, eq=False)
class _NodeWriter(ConvWriter):
    """The nodes of each draft."""

    bodies: Bodies

    def nodes(self, draft: Draft) -> Iterable[Node]:
        """Write a draft."""
        write: Callable[[Draft], Node | Iterable[Node]] = getattr(self, f"_{draft.kind}")
        made = write(draft)
        return made if isinstance(made, list) else [cast(Node, made)]

    def _select(self, draft: Draft) -> Select:
        read = draft.reads[0]
        x, made = self.forms[read.tensor], self.forms[draft.y]
        channels, width = draft.constants
        return Select(
            path=draft.step.path, x=read.tensor, y=draft.y,
            channels=tuple(channels.tolist()), in_channels=int(width),
            activation="ReLU" if made.relu or (read.relu and not x.relu) else "None",
            output_precision=made.precision,
            input_range=x.amax if x.precision == "int8" else None,
        )  # fmt: skip

    def _pool(self, draft: Draft) -> Pool:
        (x,), grid = draft.reads, self._axes(self.seen[draft.y].grid)
        kernel, stride, padding, dilation, _, subm, *_ = draft.step.args[4:]
        pool = Pool(
            path=draft.step.path, x=x.tensor, y=draft.y,
            kernel_size=self._axes(kernel), stride=self._axes(stride),
            padding=self._axes(padding, 0), dilation=self._axes(dilation),
            subm=subm, rulebook=draft.step.args[3] or "",
            input_spatial_shape=grid, output_spatial_shape=grid,
            output_precision=self._without_relu(draft).precision,
            input_range=None if isinstance(x.form, str) else self.forms[x.tensor].amax,
        )  # fmt: skip
        return replace(pool, output_spatial_shape=pool.output_on(grid)[1])

    def _steps(self, draft: Draft) -> Steps:
        between, made, bodies = draft.between, self.forms[draft.y], self.bodies
        assert between is not None
        places = dict.fromkeys((*between.places.values(), *([between.on] if between.on else [])))
        read = (*(reading.tensor for reading in draft.reads), *places)
        return Steps(
            path=draft.step.path, y=draft.y,
            xs=tuple(reading.tensor for reading in draft.reads),
            ranges=tuple(
                0.0 if isinstance(reading.form, str) else float(reading.form.scale) * _STEPS
                for reading in draft.reads
            ),
            places=tuple(places),
            on=read.index(between.on) if between.on else -1,
            grid=self._axes(between.grid) if between.grid else (),
            channels=int(bodies.source.shapes[between.value][-1]),
            frames=bodies.frames if between.frames else 0,
            body=bodies.write(between, tuple(places), relu=made.relu),
            output_precision=made.precision,
        )  # fmt: skip

    def _add(self, draft: Draft) -> list[Node]:
        (x, other), step = draft.reads, draft.step
        integer = isinstance(step, integer_program.Add)
        range_x, range_other = (self.forms[r.tensor].amax for r in (x, other))
        if integer and any(isinstance(r.form, str) for r in (x, other)):
            raise ValueError(
                f"export_sparse_onnx: {named(step)} adds what nothing quantizes; quantize both "
                "operands with one quantizer (QuantConfig(quantize_add=True))"
            )
        if integer and range_x != range_other:
            raise ValueError(
                f"export_sparse_onnx: {named(step)} adds tensors of the ranges {range_x:g} "
                f"and {range_other:g}; the engine wants one: share one quantizer "
                "(bevquant_qnn.QuantAdd)"
            )
        made = self.forms[draft.y]
        summed = f"{draft.y} before ReLU" if made.relu else draft.y
        add = Add(
            path=step.path, x=x.tensor, other=other.tensor, y=summed,
            precision="int8" if integer else "fp16", output_precision=made.precision,
            range_x=range_x if integer else None, range_other=range_other if integer else None,
        )  # fmt: skip
        return [add, Relu(path=step.path, x=summed, y=draft.y)] if made.relu else [add]

    def _concat(self, draft: Draft) -> Concat:
        made = self._without_relu(draft)
        integer = all(not isinstance(r.form, str) for r in draft.reads)
        ranges = {self.forms[r.tensor].amax for r in draft.reads} if integer else {None}
        if len(ranges) > 1 or (integer and made.amax not in (None, *ranges)):
            raise ValueError(
                f"export_sparse_onnx: {named(draft.step)} joins tensors of the ranges "
                f"{', '.join(f'{r:g}' for r in ranges if r is not None)}, read in "
                f"{made.amax or 'float'}; one is wanted: share one quantizer "
                "(bevquant_qnn.QuantConcat)"
            )
        return Concat(
            path=draft.step.path, xs=tuple(r.tensor for r in draft.reads), y=draft.y,
            precision="int8" if integer else "fp16", output_precision=made.precision,
            input_range=ranges.pop(),
        )  # fmt: skip

    def _fold(self, draft: Draft) -> Fold:
        made, channels = self._without_relu(draft), self.seen[draft.y].made[1]
        return Fold(
            path=draft.step.path, x=draft.reads[0].tensor, y=draft.y, channels=channels,
            output_precision=made.precision,
        )  # fmt: skip

    def _without_relu(self, draft: Draft) -> TensorForm:
        if self.forms[draft.y].relu:
            raise ValueError(
                f"export_sparse_onnx: {named(draft.step)}: a ReLU follows; the dialect has it "
                "behind a convolution or an addition: apply it before"
            )
        return self.forms[draft.y]

    # The dense grid

    def _on_grid(self, draft: Draft) -> tuple[Step, Seen, str]:
        """Step, sizes and input of an operator on the dense grid."""
        (x,), made = draft.reads, self.forms[draft.y]
        if made.relu or made.amax is not None or not isinstance(x.form, str):
            raise ValueError(
                f"export_sparse_onnx: {named(draft.step)}: what follows it is a ReLU or a "
                "quantized layer on the dense grid, which the engine does not have: "
                f"{BEHIND_DENSE}"
            )
        return draft.step, self.seen[draft.y], x.tensor

    def _scatter(self, draft: Draft) -> list[Node]:
        step, seen, x = self._on_grid(draft)
        grid = self._axes(seen.made[2:])
        flat = len(grid) > len(seen.made[2:])
        made_in = f"{draft.y} on three axes" if flat else draft.y
        scatter = Scatter(
            path=step.path, x=x, y=made_in, input_spatial_shape=grid,
            format=self.order, output_shape=(1, seen.made[1], *grid),
        )  # fmt: skip
        dims = (1, *seen.made[1:])
        reshape = LayoutOp(path=step.path, op="Reshape", x=made_in, y=draft.y, dims=dims)
        return [scatter, reshape] if flat else [scatter]

    def _permute(self, draft: Draft) -> LayoutOp:
        step, seen, x = self._on_grid(draft)
        dims = _permutation(draft, len(seen.read))
        self._check_frames(draft, dims[0] == 0)
        return LayoutOp(path=step.path, op="Transpose", x=x, y=draft.y, dims=dims)

    def _reshape(self, draft: Draft) -> LayoutOp:
        step, seen, x = self._on_grid(draft)
        per_frame = math.prod(seen.read[1:]) == math.prod(seen.made[1:])
        self._check_frames(draft, seen.made[0] == seen.read[0] and per_frame)
        dims = (1, *seen.made[1:])
        return LayoutOp(path=step.path, op="Reshape", x=x, y=draft.y, dims=dims)

    def _check_frames(self, draft: Draft, keeps: bool) -> None:
        if not keeps:
            seen = self.seen[draft.y]
            raise ValueError(
                f"export_sparse_onnx: {named(draft.step)} moves the batch axis from {seen.read} to "
                f"{seen.made}; keep it first"
            )


def _permutation(draft: Draft, rank: int) -> tuple[int, ...]:
    """The permutation of the axes, from the sizes of a probe."""
    if rank > len(_PRIMES):
        raise ValueError(f"export_sparse_onnx: {named(draft.step)} permutes {rank} axes")
    function: Any = draft.step.target
    probe = torch.empty(_PRIMES[:rank], device="meta")
    made = function(probe, *draft.step.args[1:], **draft.step.kwargs)
    return tuple(_PRIMES.index(size) for size in made.shape)
