"""Calibrated sparse models as files for NVIDIA's sparse convolution engine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bevquant_export._differences import TensorDifference
from bevquant_export._figures import figures_of
from bevquant_export._taken_numbers import refuse_computed_grids, refuse_decisions
from bevquant_export._takes_float8 import refuse_float8
from bevquant_export.sparse._axes import turned
from bevquant_export.sparse._between import follow
from bevquant_export.sparse._check_graph import numbered
from bevquant_export.sparse._graph import Conv, Graph, Node
from bevquant_export.sparse._half_precision import with_half_constants
from bevquant_export.sparse._make_graph import sparse_graph
from bevquant_export.sparse._proto import graph_of_bytes, proto_bytes
from bevquant_export.sparse._verify import (
    SparseExport,
    beside_floats,
    layers_of,
    portable_bytes,
    verified,
    with_note,
)
from bevquant_graph import reported_by
from bevquant_int8sim import IntegerModel, simulate
from bevquant_quantizers import write_whole

_FIRST = "subm1"

DIALECTS = ("libspconv", "portable")
ORDERS = ("xyz", "zyx")


@reported_by("export_sparse_onnx")
def export_sparse_onnx(
    model: nn.Module | IntegerModel,
    example_inputs: Any,
    path: str | os.PathLike[str],
    *,
    dialect: str = "libspconv",
    model_order: str = "xyz",
    order: str | None = None,
    batches: Iterable[Any] = (),
    head_room: float = 1.5,
    all_layers: bool = False,
    weights: str = "auto",
    verify: bool = True,
    measure: bool = False,
) -> SparseExport:
    """Write a calibrated sparse encoder as ONNX, for NVIDIA's libspconv or for onnxruntime.

    The file has the integer model's convolutions: weights whose integers are those of
    `bevquant_int8sim.simulate` under any rounding, one range per tensor, the ReLU fused, a bias
    always, int8 where both quantizers are enabled and fp16 elsewhere. Biases and fp16 weights are
    rounded to float16 (`with_half_constants`).

    Supported on voxels: sparse convolutions of one to three axes (pillars have one cell of height),
    inverse convolutions, residual additions, ReLU, ``dense()`` with permute and reshape, quantized
    linear layers, batch norms that are not folded, sums and products with float16 constants,
    concatenated channels. Concatenations on the same voxels, channel slices and chunks, and sums of
    channel groups (UNets) become 1×1×1 convolutions, additions or parts of a layer for libspconv,
    with the same values. The portable dialect keeps these, and writes other operations between
    layers as
    functions: max pooling, gates, merged or selected voxels. Computations on coordinates alone are
    left out of both.

    Args:
        model: A calibrated model in evaluation mode, batch norms folded. It is not changed. Or the
            result of `simulate` for `with_half_constants` of it, which saves a second capture; its
            inputs may have fewer voxels than the example.
        example_inputs: Arguments of one call; run once for the sizes in the file.
        path: The file. It is written to a temporary name and renamed.
        dialect: ``"libspconv"``, or ``"portable"``: standard operators, which onnxruntime runs on a
            CPU (inputs and outputs: `lower_to_portable`).
        model_order: Order of the model's coordinate columns after the batch: ``"xyz"``
            (mit-bevfusion) or ``"zyx"`` (mmdetection3d).
        order: Order of the columns in the file (default: the model's). The dense result is the
            same.
        batches: Further inputs, whose voxels are counted for `output_bound`.
        head_room: `output_bound` of a layer is this factor times the largest number of voxels in
            one frame, rounded up to a thousand. The engine drops further voxels.
        all_layers: Portable only: each convolution and sum is an output too, by node name.
        weights: Portable only. ``"auto"`` is the fastest form that is exact on this CPU
            (`cpu_at_hand`). ``"uint8"`` is exact on every CPU; seven-bit weights are int8 in any
            case, as they never saturate. ``"int8"`` gives the same integers faster on CPUs that do
            not saturate sums of pairs.
        verify: Before the file gets its name, compare the integer model with `model` and the file
            with the integer model, on `example_inputs`: portable files in onnxruntime where that is
            installed, others with the simulator's kernels. The metadata ``verified`` names the
            runtime; ``"no"`` with False.
        measure: Portable only: run the file beside the same layers in float32, both in onnxruntime,
            and report both times in the result's `figures`.

    Returns:
        The file, its layers and its size.

    Raises:
        TypeError: `model` is not a module.
        ValueError: An operation has no form in the dialect, a layer is not calibrated or exceeds
            float16, or the file computes other values than the model. The message names the module.

    Example:
        >>> from bevquant_qnn import quantize_model
        >>> from bevquant_quantizers import calibrate
        >>> def write(encoder, frames):
        ...     quantized = quantize_model(encoder, example_inputs=frames[0]).model
        ...     calibrate(quantized, frames, forward=lambda m, frame: m(*frame))
        ...     return export_sparse_onnx(
        ...         quantized, frames[0], "lidar.backbone.xyz.onnx", batches=frames
        ...     )
    """
    if dialect not in DIALECTS:
        raise ValueError(
            f"export_sparse_onnx: dialect={dialect!r}: expected 'libspconv' or 'portable'"
        )
    for name, asked in (("measure", measure), ("all_layers", all_layers)):
        if asked and dialect != "portable":
            raise ValueError(f"export_sparse_onnx: {name}=True needs dialect='portable'")
    if weights != "auto" and dialect != "portable":
        raise ValueError(
            f"export_sparse_onnx: weights={weights!r} with dialect={dialect!r}: expected 'auto'; "
            "'uint8' and 'int8' go with dialect='portable'"
        )
    order = model_order if order is None else order
    for name, value in (("model_order", model_order), ("order", order)):
        if value not in ORDERS:
            raise ValueError(f"export_sparse_onnx: {name}={value!r}: expected 'xyz' or 'zyx'")
    if not head_room >= 1:
        raise ValueError(f"export_sparse_onnx: head_room={head_room}: expected 1 or more")
    if isinstance(model, IntegerModel):
        rounded, integers = _source_of(model), model
    elif isinstance(model, nn.Module):
        for called, parameter in model.named_parameters():
            if parameter.dtype in (torch.float16, torch.bfloat16):
                raise ValueError(
                    f"export_sparse_onnx: parameter {called} is {parameter.dtype}; expected "
                    "float32. Call model.float() before it is quantized and calibrated; the file "
                    "rounds to float16 by itself"
                )
        rounded = with_half_constants(model)
        integers = simulate(rounded, example_inputs, verify=verify)
    else:
        raise TypeError(f"export_sparse_onnx: expected a module, got {type(model).__name__}")
    made, _ = write_sparse(
        rounded, integers, integers.inputs_of(example_inputs), path, dialect=dialect,
        model_order=model_order, order=order, batches=batches, head_room=head_room,
        all_layers=all_layers, weights=weights, verify=verify, measure=measure,
    )  # fmt: skip
    if made.begins_behind and dialect != "portable":
        warnings.warn(f"export_sparse_onnx: {path}: {made.beginning}", stacklevel=2)
    return made


def _source_of(integers: IntegerModel) -> nn.Module:
    """The module that an integer model was made of."""
    if integers.source is None:
        raise ValueError(
            "export_sparse_onnx: the integer model was loaded from a folder; give the calibrated "
            "model"
        )
    module = integers.source.graph.model
    own, held = module.state_dict(), with_half_constants(module).state_dict()
    if own.keys() != held.keys() or not all(map(torch.equal, own.values(), held.values())):
        raise ValueError(
            "export_sparse_onnx: the integer model has constants that float16 does not hold; give "
            "the calibrated model, or what simulate makes of with_half_constants(model)"
        )
    return module


def write_sparse(
    rounded: nn.Module,
    integers: IntegerModel,
    example_inputs: Any,
    path: str | os.PathLike[str],
    *,
    dialect: str,
    model_order: str,
    order: str,
    batches: Iterable[Any],
    head_room: float,
    all_layers: bool,
    weights: str,
    verify: bool,
    measure: bool,
    names: Mapping[str, str] | None = None,
) -> tuple[SparseExport, dict[str, Any]]:
    """`export_sparse_onnx` for a model's integers, and the outputs of the file for the example.

    `rounded` is the model with the constants of a file, from which `integers` was made; `names` are
    names of outputs, by the returned values of the program.
    """
    refuse_float8(integers.program, (), "export_sparse_onnx", f"dialect {dialect!r}")
    refuse_decisions(integers, "export_sparse_onnx")
    refuse_computed_grids(integers, "export_sparse_onnx")
    graph = sparse_graph(
        rounded, integers, example_inputs, batches, model_order, head_room, dialect=dialect
    )
    reversed_axes = order != model_order
    graph = official_keys(turned(graph) if reversed_axes else graph)
    graph = numbered(graph, _output_names(integers, names or {}, dialect))
    content = proto_bytes(graph)
    if dialect == "portable":
        # Through the bytes, so that both dialects hold the same numbers.
        whole = replace(graph_of_bytes(content, extensions=True), features=graph.features)
        content = portable_bytes(whole, all_layers=all_layers, weights=weights)
    ran, returned = "no", None
    rows: tuple[TensorDifference, ...] = ()
    outputs: dict[str, Any] = {}
    if verify:
        ran, rows, returned, outputs = verified(
            content, integers, example_inputs, dialect=dialect, reversed_axes=reversed_axes
        )
    timing = beside_floats(content, integers, example_inputs, reversed_axes) if measure else None
    content = with_note(content, ran)
    write_whole(path, content)
    before = follow(integers).before
    features = graph.features if dialect == "portable" else graph.input
    layers = layers_of(graph)
    figures = figures_of(content, on_cpu=dialect == "portable", timing=timing)
    made = SparseExport(
        Path(path), layers, ran, rows, integers, before, features, returned, figures
    )
    return made, outputs


def _output_names(integers: IntegerModel, names: Mapping[str, str], dialect: str) -> dict[str, str]:
    """Tensors of the graph that are named results, and these names."""
    if not names:
        return {}
    followed = follow(integers, extended=dialect == "portable")
    pairs = zip(followed.results, followed.outputs, strict=True)
    return {reading.tensor: names[value] for value, reading in reversed(list(pairs))}


def official_keys(graph: Graph) -> Graph:
    """Return `graph` with the key ``subm1`` at a submanifold convolution that reads the input.

    Other convolutions with that key get a new one; shared pairs stay shared. A first convolution
    without a key gets ``subm1`` alone: the engine then builds its pairs twice, but never uses wrong
    ones.
    """
    first = next((n for n in graph.nodes if isinstance(n, Conv) and n.x == graph.input), None)
    if first is None or not first.subm or first.rulebook == _FIRST:
        return graph
    used = {node.rulebook for node in graph.nodes if isinstance(node, Conv)}
    others = (f"{_FIRST}_{number}" for number in count(2))
    renamed = {_FIRST: next(key for key in others if key not in used)}
    if first.rulebook:
        renamed[first.rulebook] = _FIRST

    def keyed(node: Node) -> Node:
        if not isinstance(node, Conv):
            return node
        key = _FIRST if node is first else renamed.get(node.rulebook, node.rulebook)
        return replace(node, rulebook=key)

    return replace(graph, nodes=tuple(keyed(node) for node in graph.nodes))
