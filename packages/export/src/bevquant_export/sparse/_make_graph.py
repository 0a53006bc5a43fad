"""From the integers of a model to the graph of a file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from bevquant_export._size_guards import sparse_guards
from bevquant_export.sparse._axes import AXES, three_axes
from bevquant_export.sparse._beginning import BEHIND_DENSE
from bevquant_export.sparse._between import follow
from bevquant_export.sparse._channel_permutations import with_channel_permutations
from bevquant_export.sparse._check_graph import check_rulebooks
from bevquant_export.sparse._compare import frame_of
from bevquant_export.sparse._conv_node import (
    TensorForm,
    affine_node,
    agreed_forms,
    check_axes,
    conv_node,
)
from bevquant_export.sparse._follow import Draft, Followed, place
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
from bevquant_int8sim import IntegerModel
from bevquant_int8sim import program as integer_program
from bevquant_sparse import build_rulebook

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

    Raises:
        ValueError: A step has no form in a file; the message names its module.
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
    seen = observe(integers, example_inputs, batches)
    bodies = Bodies(integers, example_inputs, order)
    values = integers.program.values
    forms = agreed_forms(followed)
    nodes: list[Node] = []
    if forms[followed.input].relu:
        raise ValueError(
            "export_sparse_onnx: a ReLU reads the input features; the dialect has it behind a "
            "convolution or an addition: apply it before the model"
        )
    for draft in followed.drafts:
        if draft.kind == "select":
            nodes.append(_selection(draft, forms))
            continue
        if draft.kind == "steps":
            nodes.append(_function(draft, forms, bodies))
            continue
        size = seen[draft.y]
        if draft.kind == "conv":
            check_axes(draft, fewest=1 if fewer_axes else AXES)
        if draft.kind in ("conv", "linear"):
            nodes.append(conv_node(draft, forms, size, rounded, values, head_room, order))
        elif draft.kind in ("affine", "matrix"):
            read = seen[draft.first or draft.y].largest
            nodes.append(affine_node(draft, forms, size, read, head_room))
        elif draft.kind == "add":
            nodes += _addition(draft, forms)
        elif draft.kind == "concat":
            nodes.append(_concatenation(draft, forms))
        elif draft.kind == "pool":
            nodes.append(_pooling(draft, size, forms, order))
        elif draft.kind == "fold":
            nodes.append(_folded(draft, size, forms))
        else:
            nodes += _tail(draft, size, forms, order)
    shapes = {r.tensor: _shape(seen[r.tensor]) for r in followed.outputs if r.tensor in seen}
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


def _selection(draft: Draft, forms: Mapping[str, TensorForm]) -> Select:
    read = draft.reads[0]
    x, made = forms[read.tensor], forms[draft.y]
    channels, width = draft.constants
    return Select(
        path=draft.step.path, x=read.tensor, y=draft.y,
        channels=tuple(channels.tolist()), in_channels=int(width),
        activation="ReLU" if made.relu or (read.relu and not x.relu) else "None",
        output_precision=made.precision,
        input_range=x.amax if x.precision == "int8" else None,
    )  # fmt: skip


def _pooling(draft: Draft, seen: Seen, forms: Mapping[str, TensorForm], order: str) -> Pool:
    (x,) = draft.reads
    made = _without_relu(draft, forms)
    key, *geometry = draft.step.args[3:]
    kernel_size, stride, padding, dilation, _, subm, *_ = geometry
    windows = (kernel_size, stride, padding, dilation)
    nothing = torch.zeros(0, 1 + len(seen.grid), dtype=torch.int32)
    rulebook = build_rulebook(nothing, seen.grid, *windows, subm=subm, batch_size=1)
    kernel, steps, pad, apart = (
        three_axes(tuple(sizes), fill, order)
        for sizes, fill in zip(windows, (1, 1, 0, 1), strict=True)
    )
    return Pool(
        path=draft.step.path, x=x.tensor, y=draft.y,
        kernel_size=kernel, stride=steps, padding=pad, dilation=apart, subm=subm,
        rulebook=key or "",
        input_spatial_shape=three_axes(seen.grid, 1, order),
        output_spatial_shape=three_axes(tuple(rulebook.out_shape), 1, order),
        output_precision=made.precision,
        input_range=None if isinstance(x.form, str) else forms[x.tensor].amax,
    )  # fmt: skip


def _function(draft: Draft, forms: Mapping[str, TensorForm], bodies: Bodies) -> Steps:
    between, made = draft.between, forms[draft.y]
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
        grid=three_axes(between.grid, 1, bodies.order) if between.grid else (),
        channels=int(bodies.source.shapes[between.value][-1]),
        frames=bodies.frames if between.frames else 0,
        body=bodies.write(between, tuple(places), relu=made.relu),
        output_precision=made.precision,
    )  # fmt: skip


def _channels(followed: Followed, nodes: list[Node], bodies: Bodies) -> int:
    for node in nodes:
        if isinstance(node, Conv | Select) and node.x == followed.input:
            return node.in_channels
        if isinstance(node, Pool | Steps) and followed.input in node.inputs:
            return int(bodies.source.shapes[followed.input][1])
    raise ValueError("export_sparse_onnx: no convolution reads the input features")


def _shape(seen: Seen) -> tuple[int, ...]:
    return (1, *seen.made[1:])


def _addition(draft: Draft, forms: Mapping[str, TensorForm]) -> list[Node]:
    x, other = draft.reads
    integer = isinstance(draft.step, integer_program.Add)
    held = [forms[r.tensor] for r in (x, other)]
    if integer and any(isinstance(r.form, str) for r in (x, other)):
        raise ValueError(
            f"export_sparse_onnx: {place(draft.step)} adds what nothing quantizes; quantize both "
            "operands with one quantizer (QuantConfig(quantize_add=True))"
        )
    if integer and held[0].amax != held[1].amax:
        raise ValueError(
            f"export_sparse_onnx: {place(draft.step)} adds tensors of the ranges {held[0].amax:g} "
            f"and {held[1].amax:g}; the engine wants one: share one quantizer "
            "(bevquant_qnn.QuantAdd)"
        )
    made = forms[draft.y]
    summed = f"{draft.y} before ReLU" if made.relu else draft.y
    add = Add(
        path=draft.step.path,
        x=x.tensor,
        other=other.tensor,
        y=summed,
        precision="int8" if integer else "fp16",
        output_precision=made.precision,
        range_x=held[0].amax if integer else None,
        range_other=held[1].amax if integer else None,
    )
    return [add, Relu(path=draft.step.path, x=summed, y=draft.y)] if made.relu else [add]


def _concatenation(draft: Draft, forms: Mapping[str, TensorForm]) -> Concat:
    made = _without_relu(draft, forms)
    integer = all(not isinstance(r.form, str) for r in draft.reads)
    ranges = {forms[r.tensor].amax for r in draft.reads} if integer else {None}
    if len(ranges) > 1 or (integer and made.amax not in (None, *ranges)):
        raise ValueError(
            f"export_sparse_onnx: {place(draft.step)} joins tensors of the ranges "
            f"{', '.join(f'{r:g}' for r in ranges if r is not None)}, read in "
            f"{made.amax or 'float'}; one is wanted: share one quantizer (bevquant_qnn.QuantConcat)"
        )
    return Concat(
        path=draft.step.path,
        xs=tuple(r.tensor for r in draft.reads),
        y=draft.y,
        precision="int8" if integer else "fp16",
        output_precision=made.precision,
        input_range=ranges.pop(),
    )


def _folded(draft: Draft, seen: Seen, forms: Mapping[str, TensorForm]) -> Fold:
    made = _without_relu(draft, forms)
    (x,) = draft.reads
    return Fold(
        path=draft.step.path, x=x.tensor, y=draft.y, channels=seen.made[1],
        output_precision=made.precision,
    )  # fmt: skip


def _without_relu(draft: Draft, forms: Mapping[str, TensorForm]) -> TensorForm:
    if forms[draft.y].relu:
        raise ValueError(
            f"export_sparse_onnx: {place(draft.step)}: a ReLU follows; the dialect has it behind a "
            "convolution or an addition: apply it before"
        )
    return forms[draft.y]


def _tail(draft: Draft, seen: Seen, forms: Mapping[str, TensorForm], order: str) -> list[Node]:
    (x,) = draft.reads
    made = forms[draft.y]
    if made.relu or made.amax is not None or not isinstance(x.form, str):
        raise ValueError(
            f"export_sparse_onnx: {place(draft.step)}: what follows it is a ReLU or a quantized "
            f"layer on the dense grid, which the engine does not have: {BEHIND_DENSE}"
        )
    step = draft.step
    if draft.kind == "scatter":
        grid = three_axes(seen.made[2:], 1, order)
        flat = len(grid) > len(seen.made[2:])
        made_in = f"{draft.y} on three axes" if flat else draft.y
        scatter = Scatter(
            path=step.path, x=x.tensor, y=made_in, input_spatial_shape=grid,
            format=order, output_shape=(1, seen.made[1], *grid),
        )  # fmt: skip
        dims = (1, *seen.made[1:])
        reshape = LayoutOp(path=step.path, op="Reshape", x=made_in, y=draft.y, dims=dims)
        return [scatter, reshape] if flat else [scatter]
    if draft.kind == "permute":
        dims, op = _permutation(draft, len(seen.read)), "Transpose"
        keeps = dims[0] == 0
    else:
        dims, op = (1, *seen.made[1:]), "Reshape"
        per_frame = math.prod(seen.read[1:]) == math.prod(seen.made[1:])
        keeps = seen.made[0] == seen.read[0] and per_frame
    if not keeps:
        raise ValueError(
            f"export_sparse_onnx: {place(draft.step)} moves the batch axis from {seen.read} to "
            f"{seen.made}; keep it first"
        )
    return [LayoutOp(path=step.path, op=op, x=x.tensor, y=draft.y, dims=dims)]


def _permutation(draft: Draft, rank: int) -> tuple[int, ...]:
    """The permutation of the axes, from the sizes of a probe."""
    if rank > len(_PRIMES):
        raise ValueError(f"export_sparse_onnx: {place(draft.step)} permutes {rank} axes")
    function: Any = draft.step.target
    probe = torch.empty(_PRIMES[:rank], device="meta")
    made = function(probe, *draft.step.args[1:], **draft.step.kwargs)
    return tuple(_PRIMES.index(size) for size in made.shape)
