"""A libspconv file as one of standard operators."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from bevquant_export._figures import figures_of
from bevquant_export._size_guards import note_guards
from bevquant_export.sparse._graph import Graph
from bevquant_export.sparse._layers import SparseExport, layers_of
from bevquant_export.sparse._names import numbered
from bevquant_export.sparse._read_proto import read_graph
from bevquant_export.sparse._verify import same_as_source, with_note
from bevquant_export.sparse.portable._record import recorded
from bevquant_export.targets._cpu import chosen_weights
from bevquant_quantizers import write_whole


def lower_to_portable(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    all_layers: bool = False,
    weights: str = "auto",
    verify: bool = True,
) -> SparseExport:
    """Write a libspconv file, ours or NVIDIA's, as one that stock onnxruntime runs on a CPU.

    Every sparse operator becomes a few standard ones in functions of the file (opset 18, domain
    ``bevquant.sparse``), so that ``onnx.checker`` passes and nothing has to be installed. The
    integers are those of `load_sparse_onnx` on the source, to the last one; fp16 layers run in
    float32, whose sums onnxruntime takes in an order of its own.

    Inputs of the new file, none of which may be left out:

    - ``features`` float32 ``[voxels, channels]``, any number of voxels, in any order; where the
      file begins behind steps of the model, named after the last one, as in ``sigmoid_features``;
    - ``coords`` int32 ``[voxels, 4]``: batch, then the axes in the order of the source file;
    - ``batch_size`` int64 ``[1]``: frames, which ``coords`` alone do not tell where the last one
      is empty.

    A voxel outside of the grid or the batch, one that occurs twice and NaN end the run with an
    error that names the rule (``voxels_occur_once``). Outputs: ``output`` float32 (``output0``, …
    of several): dense ``[batch, …]`` as the source says, or the rows of a sparse tensor, whose
    voxels are ``output.coords``, int32. `output_bound` has no effect: a portable file takes any
    number of voxels.

    Args:
        source: A libspconv file. A portable one is written again.
        path: The new file; it appears whole or not at all.
        all_layers: Give away what every convolution, sum and ReLU makes as well, under the name of
            its node: int8, or float32 where the layer's output is fp16; new voxels as
            ``<node>.coords``.
        weights: ``"auto"`` is the fastest form that is exact on the CPU at hand (`cpu_at_hand`);
            ``"uint8"`` multiplies exactly on every CPU (layers of seven-bit weights are int8 all
            the same, as those saturate on none); ``"int8"`` gives the same integers faster, on
            CPUs that do not saturate sums of pairs.
        verify: Run both files on drawn voxels, where onnxruntime is installed, before the new one
            gets its name; its metadata say so (``verified``).

    Returns:
        The file and its layers, whose names are those of the outputs.

    Raises:
        ValueError: The source is broken, readers of a tensor state several ranges, sums may leave
            int32, or a layer's voxels are not known; the node is named.

    Example:
        >>> lower_to_portable("missing.onnx", "portable.onnx")
        Traceback (most recent call last):
        ...
        ValueError: lower_to_portable: missing.onnx: no such file as missing.onnx
    """
    try:
        weights = chosen_weights(weights)
        graph = _named(read_graph(Path(source)))
        content = portable_bytes(graph, all_layers=all_layers, weights=weights)
        ran = same_as_source(content, graph) if verify else "no"
    except ValueError as error:
        raise ValueError(f"lower_to_portable: {error}") from error
    content = with_note(content, ran)
    write_whole(path, content)
    figures = figures_of(content, on_cpu=True)
    return SparseExport(Path(path), layers_of(graph), ran, features=graph.features, figures=figures)


def _named(graph: Graph) -> Graph:
    """Nodes numbered; one that had another name and no module keeps its name in place of that."""
    nodes = [
        replace(new, path=old.name) if not old.path and old.name != new.name else new
        for old, new in zip(graph.nodes, numbered(graph).nodes, strict=True)
    ]
    return replace(numbered(graph), nodes=tuple(nodes))


def portable_bytes(graph: Graph, *, all_layers: bool, weights: str) -> bytes:
    """The portable file of a graph as it was read from a file, nodes numbered.

    Raises:
        ValueError: Other weights than `chosen_weights` knows.
    """
    whole = replace(graph, weights=chosen_weights(weights))
    model = recorded(whole, all_layers=all_layers).model
    note_guards(model, graph.guards)
    content: bytes = model.SerializeToString(deterministic=True)
    return content
