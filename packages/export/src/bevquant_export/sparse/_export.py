"""Writing a calibrated sparse model for NVIDIA's sparse convolution engine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from bevquant_export.sparse._follow import follow
from bevquant_export.sparse._graph import Add, Conv, Graph
from bevquant_export.sparse._half_precision import with_half_constants
from bevquant_export.sparse._make_graph import make_graph
from bevquant_export.sparse._names import numbered
from bevquant_export.sparse._observe import observe
from bevquant_export.sparse._rulebooks import check_rulebooks
from bevquant_export.sparse._turn_axes import turned
from bevquant_export.sparse._write_proto import proto_bytes
from bevquant_int8sim import simulate
from bevquant_quantizers import write_whole

__all__ = ["SparseExport", "SparseLayer", "export_sparse_onnx"]

_ORDERS = ("xyz", "zyx")


@dataclass(frozen=True)
class SparseLayer:
    """One convolution or addition of a file.

    Attributes:
        name: Its node.
        path: The module it comes from.
        precision: ``"int8"`` or ``"fp16"``.
        output_precision: How its output is held.
        input_range: amax of its input; ``None`` in fp16.
        output_bound: Most voxels of its output; ``None`` for additions.
    """

    name: str
    path: str
    precision: str
    output_precision: str
    input_range: float | None
    output_bound: int | None


@dataclass(frozen=True)
class SparseExport:
    """What was written: the file, and its layers in order."""

    path: Path
    layers: tuple[SparseLayer, ...]


def export_sparse_onnx(
    model: nn.Module,
    example_inputs: Any,
    path: str | os.PathLike[str],
    *,
    dialect: str = "libspconv",
    model_order: str = "xyz",
    order: str | None = None,
    batches: Iterable[Any] = (),
    head_room: float = 1.5,
) -> SparseExport:
    """Write a calibrated sparse encoder as the ONNX file that NVIDIA's libspconv loads.

    The file says of each convolution what the integer model computes: a weight whose integers
    are those of `bevquant_int8sim.simulate` under any rounding, one range per tensor, the ReLU
    inside, a bias always, int8 where both quantizers are on and fp16 elsewhere. Biases and fp16
    weights are rounded to float16 (`with_half_constants`).

    Args:
        model: Calibrated, in evaluation mode, batch norms folded: sparse convolutions of three
            axes, residual additions, ReLU, inverse convolutions, ``dense()`` with permute and
            reshape. It is not changed.
        example_inputs: What one call takes; run once, for the sizes in the file.
        path: The file; it appears whole or not at all.
        dialect: ``"libspconv"``.
        model_order: Order of the model's coordinate columns behind the batch: ``"xyz"``
            (mit-bevfusion) or ``"zyx"`` (mmdetection3d).
        order: Order that the file wants them in; by default the model's. The dense result is the
            same.
        batches: Further inputs like the example, whose voxels are counted for `output_bound`.
        head_room: `output_bound` of a layer is this times the most voxels that one frame had
            there, rounded up to a thousand. The engine drops what is beyond.

    Raises:
        TypeError: `model` is no module.
        ValueError: Something has no form in the dialect, is not calibrated, or overflows float16;
            its module is named.

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
    if dialect != "libspconv":
        raise ValueError(f"export_sparse_onnx: dialect={dialect!r}: expected 'libspconv'")
    order = model_order if order is None else order
    for name, value in (("model_order", model_order), ("order", order)):
        if value not in _ORDERS:
            raise ValueError(f"export_sparse_onnx: {name}={value!r}: expected 'xyz' or 'zyx'")
    if not head_room >= 1:
        raise ValueError(f"export_sparse_onnx: head_room={head_room}: expected 1 or more")
    if not isinstance(model, nn.Module):
        raise TypeError(f"export_sparse_onnx: expected a module, got {type(model).__name__}")
    rounded = with_half_constants(model)
    integers = simulate(rounded, example_inputs)
    followed = follow(integers)
    seen = observe(integers, example_inputs, batches)
    values = integers.program.values
    graph = make_graph(followed, seen, rounded, values, model_order, head_room)
    check_rulebooks(graph)
    graph = numbered(graph if order == model_order else turned(graph))
    write_whole(path, proto_bytes(graph))
    return SparseExport(Path(path), _layers(graph))


def _layers(graph: Graph) -> tuple[SparseLayer, ...]:
    return tuple(
        SparseLayer(
            name=node.name,
            path=node.path,
            precision=node.precision,
            output_precision=node.output_precision,
            input_range=node.input_range if isinstance(node, Conv) else node.range_x,
            output_bound=node.output_bound if isinstance(node, Conv) else None,
        )
        for node in graph.nodes
        if isinstance(node, Conv | Add)
    )
