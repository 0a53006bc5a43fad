"""Writing a calibrated sparse model for NVIDIA's sparse convolution engine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bevquant_export._figures import figures_of
from bevquant_export._taken_numbers import refuse_computed_grids, refuse_decisions
from bevquant_export.sparse._axes import turned
from bevquant_export.sparse._between import follow
from bevquant_export.sparse._compare import LayerDifference
from bevquant_export.sparse._graph import Conv, Graph, Node
from bevquant_export.sparse._half_precision import with_half_constants
from bevquant_export.sparse._layers import SparseExport, layers_of
from bevquant_export.sparse._lower_file import portable_bytes
from bevquant_export.sparse._make_graph import sparse_graph
from bevquant_export.sparse._names import numbered
from bevquant_export.sparse._read_proto import graph_of_bytes
from bevquant_export.sparse._verify import beside_floats, verified, with_note
from bevquant_export.sparse._write_proto import proto_bytes
from bevquant_int8sim import IntegerModel, simulate
from bevquant_quantizers import write_whole

_FIRST = "subm1"

DIALECTS = ("libspconv", "portable")
ORDERS = ("xyz", "zyx")


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
    """Write a calibrated sparse encoder as an ONNX file, for NVIDIA's libspconv or onnxruntime.

    The file says of each convolution what the integer model computes: a weight whose integers
    are those of `bevquant_int8sim.simulate` under any rounding, one range per tensor, the ReLU
    inside, a bias always, int8 where both quantizers are on and fp16 elsewhere. Biases and fp16
    weights are rounded to float16 (`with_half_constants`).

    Args:
        model: Calibrated, in evaluation mode, batch norms folded: sparse convolutions of one to
            three axes (one cell of height is stated for pillars), residual additions, ReLU,
            inverse convolutions, ``dense()`` with permute and reshape; on the rows of voxels
            quantized linear layers, batch norms that nothing folds, sums and products with
            float16 constants, concatenated channels. It is not changed. Or what `simulate` made of
            `with_half_constants` of it, on inputs that may be fewer voxels than the example's,
            which saves a second capture.
        example_inputs: What one call takes; run once, for the sizes in the file.
        path: The file; it appears whole or not at all.
        dialect: ``"libspconv"``, or ``"portable"``: the same file in standard operators, which
            stock onnxruntime runs on a CPU (inputs and outputs: `lower_to_portable`). Tensors on
            the same voxels that are concatenated, channels that are chosen (slices, chunks), and
            those summed in groups (UNets), are convolutions of kernel 1×1×1 and additions, or
            parts of a layer, for libspconv, with the same values; the portable file has all as
            they are, and what else a model computes on voxels between its layers as functions: max
            pooling, gates, merged or chosen voxels. What the model makes of coordinates alone is
            left out of either.
        model_order: Order of the model's coordinate columns behind the batch: ``"xyz"``
            (mit-bevfusion) or ``"zyx"`` (mmdetection3d).
        order: Order that the file wants them in; by default the model's. The dense result is the
            same.
        batches: Further inputs like the example, whose voxels are counted for `output_bound`.
        head_room: `output_bound` of a layer is this times the most voxels that one frame had
            there, rounded up to a thousand. The engine drops what is beyond.
        all_layers: Portable only: every convolution and sum is an output too, by node name.
        weights: Portable only: ``"auto"`` is the fastest form that is exact on the CPU at hand
            (`cpu_at_hand`); ``"uint8"`` is exact on every CPU (layers of seven-bit weights are
            int8 all the same, as those saturate on none); ``"int8"`` gives the same integers
            faster, where the CPU does not saturate sums of pairs.
        verify: Hold the integer model against `model`, and the file against the integer model, on
            `example_inputs` before the file gets its name: a portable one in onnxruntime where
            that is installed, others on the simulator's kernels. The metadata say by what
            (``verified``); False writes it unseen and says ``no``.
        measure: Portable only: run the file beside the same layers in float32, both in onnxruntime,
            and report both times in the result's `figures`.

    Returns:
        The file, its layers and its size.

    Raises:
        TypeError: `model` is no module.
        ValueError: Something has no form in the dialect, is not calibrated, or overflows float16,
            or the file computes something else than the model; the module is named.

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
    if measure and dialect != "portable":
        raise ValueError("export_sparse_onnx: measure=True needs dialect='portable'")
    if all_layers and dialect != "portable":
        raise ValueError("export_sparse_onnx: all_layers=True needs dialect='portable'")
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
        rounded = with_half_constants(model)
        integers = simulate(rounded, example_inputs, verify=verify)
    else:
        raise TypeError(f"export_sparse_onnx: expected a module, got {type(model).__name__}")
    return write_sparse(
        rounded, integers, integers.inputs_of(example_inputs), path, dialect=dialect,
        model_order=model_order, order=order, batches=batches, head_room=head_room,
        all_layers=all_layers, weights=weights, verify=verify, measure=measure,
    )[0]  # fmt: skip


def _source_of(integers: IntegerModel) -> nn.Module:
    """The module that an integer model was made of.

    Raises:
        ValueError: It is not known, or has other constants than a file holds.
    """
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
    """`export_sparse_onnx` of a model's integers, and the outputs of the file for the example.

    `rounded` is the model with the constants of a file, of which `integers` were made; `names` has
    names for outputs, by the values of the program that are returned.
    """
    refuse_decisions(integers, "export_sparse_onnx")
    refuse_computed_grids(integers, "export_sparse_onnx")
    graph = sparse_graph(
        rounded, integers, example_inputs, batches, model_order, head_room, dialect=dialect
    )
    graph = official_keys(graph if order == model_order else turned(graph))
    graph = numbered(graph, _output_names(integers, names or {}, dialect))
    content = proto_bytes(graph)
    if dialect == "portable":
        # Through the bytes: both dialects then hold the very same numbers.
        whole = replace(graph_of_bytes(content, extensions=True), features=graph.features)
        content = portable_bytes(whole, all_layers=all_layers, weights=weights)
    ran, returned = "no", None
    rows: tuple[LayerDifference, ...] = ()
    outputs: dict[str, Any] = {}
    if verify:
        ran, rows, returned, outputs = verified(
            content, integers, example_inputs, dialect=dialect, reversed_axes=order != model_order
        )
    turned_axes = order != model_order
    timing = beside_floats(content, integers, example_inputs, turned_axes) if measure else None
    content = with_note(content, ran)
    write_whole(path, content)
    before = follow(integers).before
    features = graph.features if dialect == "portable" else graph.input
    if before and dialect != "portable":
        warnings.warn(
            f"export_sparse_onnx: {path}: the file begins behind {'; '.join(before)}: its input "
            f"{graph.input!r} is what these make, and libspconv takes any features of that width: "
            "compute them before the engine",
            stacklevel=3,
        )
    layers = layers_of(graph)
    figures = figures_of(content, on_cpu=dialect == "portable", timing=timing)
    made = SparseExport(
        Path(path), layers, ran, rows, integers, before, features, returned, figures
    )
    return made, outputs


def _output_names(integers: IntegerModel, names: Mapping[str, str], dialect: str) -> dict[str, str]:
    """Tensors of the graph that are results with a name, to these names."""
    if not names:
        return {}
    followed = follow(integers, extended=dialect == "portable")
    pairs = zip(followed.results, followed.outputs, strict=True)
    return {reading.tensor: names[value] for value, reading in reversed(list(pairs))}


def official_keys(graph: Graph) -> Graph:
    """`graph` with the key ``subm1`` at a submanifold convolution that reads the input.

    Whatever else had that key gets one that nothing has; what shared pairs still does. A first
    convolution without a key takes ``subm1`` alone, so that the engine builds its pairs once more
    than it must and never wrong ones.
    """
    first = next((n for n in graph.nodes if isinstance(n, Conv) and n.x == graph.input), None)
    if first is None or not first.subm or first.rulebook == _FIRST:
        return graph
    used = {node.rulebook for node in graph.nodes if isinstance(node, Conv)}
    renamed = {_FIRST: next(key for key in _other_keys() if key not in used)}
    if first.rulebook:
        renamed[first.rulebook] = _FIRST

    def keyed(node: Node) -> Node:
        if not isinstance(node, Conv):
            return node
        key = _FIRST if node is first else renamed.get(node.rulebook, node.rulebook)
        return replace(node, rulebook=key)

    return replace(graph, nodes=tuple(keyed(node) for node in graph.nodes))


def _other_keys() -> Iterator[str]:
    return (f"{_FIRST}_{number}" for number in count(2))
