"""Result of an export, the run of a file before it gets its name, and libspconv files lowered."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bevquant_export._cpu import chosen_weights, saturates_here
from bevquant_export._differences import TensorDifference, check_tensors, difference, verdict
from bevquant_export._figures import Figures, Timing, figures_of, timed
from bevquant_export._size_guards import note_guards
from bevquant_export.runtime._session import session
from bevquant_export.sparse._check_graph import numbered
from bevquant_export.sparse._compare import compared, frame_for
from bevquant_export.sparse._graph import Add, Conv, Graph, Steps
from bevquant_export.sparse._load import SparseOnnxModel, feed_of
from bevquant_export.sparse._proto import graph_of_bytes, read_graph, recorded
from bevquant_graph import HtmlTable
from bevquant_int8sim import IntegerModel
from bevquant_quantizers import write_whole
from bevquant_quantizers.plugins import importable


@dataclass(frozen=True)
class SparseLayer:
    """One convolution or addition of a sparse file.

    Attributes:
        name: Name of the node.
        path: Module that it was exported from.
        precision: ``"int8"`` or ``"fp16"``.
        output_precision: Precision of the output tensor.
        input_range: amax of the input; None for fp16 additions.
        output_bound: Largest number of output voxels; None for additions.
    """

    name: str
    path: str
    precision: str
    output_precision: str
    input_range: float | None
    output_bound: int | None


@dataclass(frozen=True)
class SparseExport(HtmlTable):
    """Result of `export_sparse_onnx`.

    Attributes:
        path: The file.
        layers: Layers in order.
        verified: Runtime that ran the file on the example before it got its name, as in the
            metadata; ``"no"`` with ``verify=False``.
        differences: Result of that run per layer, as from `compare_sparse_onnx`.
        integer_model: Integer model that the file was written from and compared with; None for a
            file made by `lower_to_portable`.
        returned: Result of `integer_model` for the example from the verification; None without
            verification.
        begins_behind: Operations that the model runs on the voxel features before the first layer
            of the file. The file does not contain them; its inputs are their results.
        features: Name of the features input: ``"0"`` for libspconv, ``"features"`` for portable
            files. Portable files that begin after leading operations use the last operation's name,
            as in ``"sigmoid_features"``.
        figures: Size of the file, CPUs where it is exact, and the time with ``measure=True``.
    """

    path: Path
    layers: tuple[SparseLayer, ...]
    verified: str = "no"
    differences: tuple[TensorDifference, ...] = ()
    integer_model: IntegerModel | None = field(default=None, repr=False, compare=False)
    begins_behind: tuple[str, ...] = ()
    features: str = "features"
    returned: Any = field(default=None, repr=False, compare=False)
    figures: Figures | None = None

    @property
    def floats(self) -> tuple[str, ...]:
        """Layers in float, as ``path: fp16: reason``."""
        why = "its input or weight is not quantized"
        return tuple(f"{v.path}: fp16: {why}" for v in self.layers if v.precision != "int8")

    @property
    def voxel_bound(self) -> int | None:
        """Largest `output_bound` of the layers; None without one."""
        bounds = (layer.output_bound for layer in self.layers)
        return max((bound for bound in bounds if bound is not None), default=None)

    @property
    def notes(self) -> tuple[str, ...]:
        """`beginning`, if there is one."""
        return (self.beginning,) if self.beginning else ()

    @property
    def beginning(self) -> str:
        """Computations before the file's run; empty if none are needed."""
        if not self.begins_behind:
            return ""
        places: dict[tuple[str, str], list[str]] = {}
        for step in self.begins_behind:  # of a module and a line in one entry
            found = re.fullmatch(r"(.+?)( \(\w+\))(.*)", step)
            key, what = ((found[1], found[3]), found[2]) if found else ((step, ""), "")
            places.setdefault(key, []).append(what.strip(" ()"))
        steps = [
            f"{module} ({', '.join(kinds)}){place}" if kinds[0] else module
            for (module, place), kinds in places.items()
        ]
        return (
            f"the file begins behind {'; '.join(steps)}. Compute these before the "
            f"engine: their result is the input {self.features!r}, and an engine takes any "
            "features of that width"
        )

    def __str__(self) -> str:
        forms = Counter(layer.precision for layer in self.layers)
        layers = " and ".join(f"{count} in {form}" for form, count in forms.items())
        text = verdict(self.verified, (row for row in self.differences if row.form == "int8"))
        floats = [row.largest / (row.size or 1.0) for row in self.differences if row.form != "int8"]
        if floats:
            text += f"; floats differ by at most {max(floats):.2g} of the largest"
        if self.begins_behind:
            text += f"\n{self.beginning}"
        figures = f"{self.figures}\n" if self.figures else ""
        return f"{self.path}: layers: {layers}\n{figures}{text}"


def layers_of(graph: Graph) -> tuple[SparseLayer, ...]:
    """Convolutions and additions in order."""
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
) -> tuple[str, tuple[TensorDifference, ...], Any, dict[str, Any]]:
    """Run the file; return the runtime, the layers' differences, and both results."""
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
    given = feed_of(graph, *frame_for(grid, integers, inputs, reversed_axes))
    floats = recorded(graph.in_floats(), all_layers=False).model
    open_session = partial(session, runner="onnxruntime", timed=True)
    return timed(onnx.ModelProto.FromString(content), floats, given, open_session)


def refuse_departures(
    rows: Iterable[TensorDifference], caller: str, *, same_arithmetic: bool = False
) -> None:
    """Raise at the first layer with more difference than rounding explains, see `check_tensors`."""
    rows = tuple(rows)
    checks = check_tensors(rows, same_arithmetic=same_arithmetic)
    for row, check in zip(rows, checks, strict=True):
        if check.is_right:
            continue
        what = f"values differ by up to {row.largest:.3g} where the largest is {row.size:.3g}"
        if check.different is not None:
            kind = "integers" if check.form == "int8" else "values"
            what = f"{row.different:,} of {row.elements:,} {kind} differ, by up to {row.largest:g}"
        raise ValueError(
            f"{caller}{row.node} ({row.path or 'the result'}) departs from the integer model: "
            f"{what}; nothing was written. verify=False writes it all the same"
        )


def same_as_source(content: bytes, source: Graph) -> str:
    """Run a portable file and its source on random voxels; return the portable file's runtime.

    Without onnxruntime, or where it saturates, there is no runtime: ``"no"``.
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
        form = "float" if wanted[name].scale is None else "int8"
        want, value = wanted[name], got[name].value
        rows.append(difference(name, value, want.value, path=want.path, form=form))
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


def lower_to_portable(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    all_layers: bool = False,
    weights: str = "auto",
    verify: bool = True,
) -> SparseExport:
    """Write a libspconv file, ours or NVIDIA's, as a file that onnxruntime runs on a CPU.

    Each sparse operator becomes standard operators in a function of the file (opset 18, domain
    ``bevquant.sparse``), so ``onnx.checker`` accepts the file and no plugin is needed. Integers
    equal those of `load_sparse_onnx` on the source. fp16 layers run in float32, in onnxruntime's
    order of summation.

    Inputs of the new file, all required:

    - ``features`` float32 ``[voxels, channels]``: any number of voxels, in any order. Files that
      begin after leading operations use the last operation's name, as in ``sigmoid_features``;
    - ``coords`` int32 ``[voxels, 4]``: batch, then the axes in the order of the source file;
    - ``batch_size`` int64 ``[1]``: number of frames (the last ones may have no voxel).

    A voxel outside the grid or the batch, a duplicate voxel and NaN stop the run with an error that
    names the rule (``voxels_occur_once``). Outputs: ``output`` float32 (``output0``, … for
    several), dense ``[batch, …]`` as in the source, or the rows of a sparse tensor, whose voxels
    are ``output.coords``, int32. `output_bound` has no effect: any number of voxels is possible.

    Args:
        source: A libspconv file. A portable file is written again.
        path: The new file. It is written to a temporary name and renamed.
        all_layers: Return each convolution, sum and ReLU too, by node name: int8, or float32 where
            the layer's output is fp16; new voxels as ``<node>.coords``.
        weights: ``"auto"``, ``"uint8"`` or ``"int8"``, see `export_sparse_onnx`.
        verify: Run both files on random voxels, where onnxruntime is installed, before the new one
            gets its name. The metadata ``verified`` says so.

    Returns:
        The file and its layers, whose names are those of the outputs.

    Raises:
        ValueError: The source is damaged, consumers of a tensor state several ranges, sums may
            leave int32, or a layer's voxels are not known; the message names the node.

    Example:
        >>> lower_to_portable("missing.onnx", "portable.onnx")
        Traceback (most recent call last):
        ...
        ValueError: lower_to_portable: missing.onnx: no such file as missing.onnx
    """
    try:
        weights = chosen_weights(weights)
        graph = _named(read_graph(source))
        content = portable_bytes(graph, all_layers=all_layers, weights=weights)
        ran = same_as_source(content, graph) if verify else "no"
    except ValueError as error:
        raise ValueError(f"lower_to_portable: {error}") from error
    content = with_note(content, ran)
    write_whole(path, content)
    figures = figures_of(content, on_cpu=True)
    return SparseExport(Path(path), layers_of(graph), ran, features=graph.features, figures=figures)


def _named(graph: Graph) -> Graph:
    """Number the nodes; a node without module keeps its other name."""
    nodes = [
        replace(new, path=old.name) if not old.path and old.name != new.name else new
        for old, new in zip(graph.nodes, numbered(graph).nodes, strict=True)
    ]
    return replace(numbered(graph), nodes=tuple(nodes))


def portable_bytes(graph: Graph, *, all_layers: bool, weights: str) -> bytes:
    """The portable file of a graph that was read from a file, nodes numbered."""
    whole = replace(graph, weights=chosen_weights(weights))
    model = recorded(whole, all_layers=all_layers).model
    note_guards(model, graph.guards)
    content: bytes = model.SerializeToString(deterministic=True)
    return content
