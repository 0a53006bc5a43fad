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
    """Number the nodes; a node without module keeps its other name."""
    nodes = [
        replace(new, path=old.name) if not old.path and old.name != new.name else new
        for old, new in zip(graph.nodes, numbered(graph).nodes, strict=True)
    ]
    return replace(numbered(graph), nodes=tuple(nodes))


def portable_bytes(graph: Graph, *, all_layers: bool, weights: str) -> bytes:
    """The portable file of a graph that was read from a file, nodes numbered.

    Raises:
        ValueError: Other weights than `chosen_weights` knows.
    """
    whole = replace(graph, weights=chosen_weights(weights))
    model = recorded(whole, all_layers=all_layers).model
    note_guards(model, graph.guards)
    content: bytes = model.SerializeToString(deterministic=True)
    return content
