"""Run of a sparse file on the example before it gets its name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export._check_tensors import check_tensors
from bevquant_export._figures import Timing, timed
from bevquant_export.dense._runnable import session
from bevquant_export.sparse._compare import LayerDifference, compared, frame_for
from bevquant_export.sparse._graph import Conv, Graph, Steps
from bevquant_export.sparse._load import SparseOnnxModel, in_floats
from bevquant_export.sparse._read_proto import graph_of_bytes
from bevquant_export.sparse.portable._record import recorded
from bevquant_export.targets._cpu import saturates_here
from bevquant_int8sim import IntegerModel
from bevquant_quantizers.plugins import importable

_KEY = "verified"
_VOXELS = 300


def _runtime(content: bytes, dialect: str) -> str:
    """Runtime for files of a dialect: onnxruntime where it is exact, or our own kernels."""
    import onnx

    if dialect != "portable" or not importable("onnxruntime"):
        return "bevquant"
    return "bevquant" if saturates_here(onnx.ModelProto.FromString(content)) else "onnxruntime"


def verified(
    content: bytes, integers: IntegerModel, inputs: Any, *, dialect: str, reversed_axes: bool
) -> tuple[str, tuple[LayerDifference, ...], Any, dict[str, Any]]:
    """Run the file; return the runtime, the layers' differences, and both results.

    Raises:
        ValueError: A layer differs from the integer model; the message names its node.
    """
    graph = graph_of_bytes(content)
    ran = _runtime(content, dialect)
    backend = "onnxruntime" if ran == "onnxruntime" else "auto"
    file = SparseOnnxModel(graph, backend=backend)
    rows, returned, outputs = compared(file, integers, inputs, reversed_axes=reversed_axes)
    refuse_departures(rows, f"export_sparse_onnx: when {ran} runs the file, ")
    return ran, rows, returned, outputs


def beside_floats(
    content: bytes, integers: IntegerModel, inputs: Any, reversed_axes: bool
) -> Timing:
    """Times of a portable file and of the same layers in float32, in turn on one frame."""
    import onnx

    graph = graph_of_bytes(content)
    grid = SparseOnnxModel(graph).grid or ()
    features, coords, batch_size = frame_for(grid, integers, inputs, reversed_axes)
    given = {
        graph.features: features.detach().cpu().float().contiguous().numpy(),
        "coords": coords.cpu().int().contiguous().numpy(),
        "batch_size": np.array([batch_size], np.int64),
    }
    floats = recorded(in_floats(graph), all_layers=False).model
    open_session = partial(session, runner="onnxruntime", timed=True)
    return timed(onnx.ModelProto.FromString(content), floats, given, open_session)


def refuse_departures(rows: Iterable[LayerDifference], caller: str) -> None:
    """Raise at the first layer with more difference than rounding explains, see `check_tensors`.

    Raises:
        ValueError: The message names node, module and difference.
    """
    rows = tuple(rows)
    for row, check in zip(rows, check_tensors(rows), strict=True):
        if check.is_right:
            continue
        what = f"values differ by up to {row.largest:.3g} where the largest is {row.size:.3g}"
        if row.form == "int8":
            what = (
                f"{row.different:,} of {row.elements:,} integers differ, by up to {row.largest:g}"
            )
        raise ValueError(
            f"{caller}{row.node} ({row.path or 'the result'}) departs from the integer model: "
            f"{what}; nothing was written. verify=False writes it all the same"
        )


def same_as_source(content: bytes, source: Graph) -> str:
    """Run a portable file and its source on random voxels; return the portable file's runtime.

    Without onnxruntime, or where it saturates, there is no runtime: ``"no"``.

    Raises:
        ValueError: A layer differs; the message names its node.
    """
    if _runtime(content, "portable") != "onnxruntime":
        return "no"
    source = replace(source, guards=())  # any voxels show whether both files are equal
    written = replace(graph_of_bytes(content), guards=())
    lowered = SparseOnnxModel(written, backend="onnxruntime")
    inputs = _voxels(lowered)
    if inputs is None:
        return "no"
    made: list[dict[str, Any]] = []
    for model in (SparseOnnxModel(replace(source, bounded=False)), lowered):
        made.append(model.run(*inputs)[1])
    wanted, got = made
    rows = []
    for name in got:
        if name not in wanted or wanted[name].value.shape != got[name].value.shape:
            continue
        want, value = wanted[name].value.double(), got[name].value.double()
        apart = (want - value).abs()
        rows.append(
            LayerDifference(
                node=name,
                path=wanted[name].path,
                form="float" if wanted[name].scale is None else "int8",
                elements=apart.numel(),
                different=int(apart.count_nonzero()),
                largest=float(apart.max()) if apart.numel() else 0.0,
                size=float(want.abs().max()) if apart.numel() else 0.0,
            )
        )
    refuse_departures(rows, "lower_to_portable: when onnxruntime runs the file, ")
    return "onnxruntime"


def _voxels(model: SparseOnnxModel) -> tuple[Tensor, Tensor, int] | None:
    """Features and coordinates in the grid of the first layer, sorted, the same at every call."""
    convs = [n for n in model.nodes if isinstance(n, Conv) and n.x == model.graph.input]
    if not convs:
        return None
    grid = convs[0].input_spatial_shape
    volume, generator = math.prod(grid), torch.Generator().manual_seed(0)
    frames = max(n.frames if isinstance(n, Steps) else 1 for n in model.nodes) or 1
    drawn = torch.randint(frames * volume, (min(_VOXELS, volume),), generator=generator)
    places = torch.tensor(sorted(set(drawn.tolist())))
    coords = torch.stack(torch.unravel_index(places, (frames, *grid)), 1).int()
    features = torch.randn(len(coords), convs[0].in_channels, generator=generator)
    return features * (convs[0].input_range or 1.0) / 2, coords, frames


def with_note(content: bytes, ran: str) -> bytes:
    """The file with the runtime of its verification in the metadata."""
    import onnx

    model = onnx.load_model_from_string(content)
    model.metadata_props.add(key=_KEY, value=ran)
    noted: bytes = model.SerializeToString(deterministic=True)
    return noted
