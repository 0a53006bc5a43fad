"""A whole detector in one call: its sparse file, its dense file, and both held together."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from bevquant_export.detector._write import Writer
from bevquant_export.detector._written import DetectorExport
from bevquant_export.sparse._export import DIALECTS, ORDERS
from bevquant_export.targets import find_target
from bevquant_export.targets.qdq import QdqTarget
from bevquant_int8sim.program import PROGRAM_READERS


def export_detector(
    model: nn.Module,
    example_inputs: Any,
    folder: str | os.PathLike[str],
    target: str = "tensorrt",
    *,
    dialect: str | None = None,
    model_order: str = "xyz",
    order: str | None = None,
    batches: Iterable[Any] = (),
    head_room: float = 1.5,
    verify: bool = True,
    **options: Any,
) -> DetectorExport:
    r"""Write a calibrated detector, voxels to outputs, as the files that its engines take.

    Engines for sparse convolutions end with ``dense()``; all behind it is another engine's. So the
    model's graph is cut there: ``sparse.onnx`` has everything up to the map, what permutes and
    reshapes it included, ``dense.onnx`` the rest, and what is computed beside the voxels (a camera
    branch). An output of the one and an input of the other that are the same map have one name,
    ``spatial_features`` (``spatial_features_0``, … of several).

    The map has one range. Whoever reads it first in the dense file is QuantizeLinear with its scale
    amax/127, and the sparse file gives the map unrounded, in float16 from libspconv: it is rounded
    to eight bits once, by the dense file. A value that float16 moves over the border of two steps
    is one step off there, which `FrameCheck.maps` counts, and nothing more may be.

    Before the files get their names the example, and the first of `batches`, go through them: each
    layer of the sparse file against the integer model, what it hands on against the integers that
    the model has there, each operation of the dense file on these maps, and the outputs at the end
    against the integer model that was not cut.

    Args:
        model: A `bevquant_qnn` model, calibrated, in evaluation mode. It is not changed.
        example_inputs: What one call takes: a tuple of positional inputs, a dict of named ones, or
            one input. The dense file takes as many frames as these are; libspconv gives one a call.
        folder: Made where it is not there. Files appear in it when all is right, or not at all.
        target: Engine of the dense file, by a name of `find_target`.
        dialect: Of the sparse file: ``"libspconv"`` or ``"portable"``, by default what the target
            goes with.
        model_order: Order of the coordinate columns behind the batch, see `export_sparse_onnx`.
        order: Order that the sparse file wants them in; by default the model's.
        batches: Further inputs like the example. The voxels of all are counted for `output_bound`.
        head_room: See `export_sparse_onnx`.
        verify: False writes the files unseen.
        **options: Of the target's `export_qdq_onnx`: ``output_names``, ``dynamic_batch``,
            ``weights``, ``integer_sums``, ``march``.

    Returns:
        Files, what is handed on, which output of which file each result of the model is, and what
        was found. A model without voxels has no sparse file, one that ends with sparse tensors or
        maps no dense one.

    Raises:
        TypeError: `model` is no module, or an option is none of the target's.
        ValueError: Something has no form in a file, lies on voxels and reads a map, or is computed
            otherwise by a file than by the model; module, file, line and remedy are named.

    Example:
        >>> def write(model, frames):
        ...     files = export_detector(model, frames[0], "onnx", "tensorrt11", batches=frames)
        ...     print(files)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"export_detector: expected a module, got {type(model).__name__}")
    engine = find_target(target)
    if not isinstance(engine, QdqTarget) or engine.kind != "dense":
        raise ValueError(
            f"export_detector: target={target!r}: expected an engine for dense files, such as "
            "'tensorrt', 'onnxruntime' or 'horizon'; dialect= says what the sparse file is"
        )
    if "input_names" in options:
        raise TypeError(
            "export_detector: input_names: inputs are called as the sparse file's outputs and the "
            "parameters of the model"
        )
    dialect = dialect or engine.sparse or "libspconv"
    if dialect not in DIALECTS:
        raise ValueError(f"export_detector: dialect={dialect!r}: expected one of {DIALECTS}")
    for name, value in (("model_order", model_order), ("order", order or model_order)):
        if value not in ORDERS:
            raise ValueError(f"export_detector: {name}={value!r}: expected one of {ORDERS}")
    if any(isinstance(m, kind) for m in model.modules() for kind in PROGRAM_READERS):
        raise ValueError(
            "export_detector: the model is another package's (bevquant_hybrid); its dense part is "
            "written by export_qdq_onnx"
        )
    axes = {"model_order": model_order, "order": order or model_order}
    writer = Writer(model, example_inputs, engine, dialect, axes, options, verify=verify)
    whole = Path(folder)
    whole.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=whole, prefix=".writing-") as unseen:
        made = writer.write(Path(unseen), list(batches), head_room)
        for file in sorted(Path(unseen).iterdir()):
            file.replace(whole / file.name)
    return _moved(made, whole)


def _moved(made: DetectorExport, folder: Path) -> DetectorExport:
    """The same with files where they lie now."""
    sparse, dense = made.sparse, made.dense
    if sparse is not None:
        sparse = replace(sparse, path=folder / sparse.path.name)
    if dense is not None:
        settings = dense.settings and folder / dense.settings.name
        dense = replace(dense, path=folder / dense.path.name, settings=settings)
    return replace(made, folder=folder, sparse=sparse, dense=dense)
