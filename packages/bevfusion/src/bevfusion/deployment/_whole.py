"""A detector in other code as files: `export_detector` finds where its sparse part ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bev_data import InputError
from bevfusion.deployment._check import file_layers
from bevfusion.deployment._export import exported_file
from bevfusion.deployment._files import FilePart
from bevfusion.deployment._pieces import Piece, Written, written_dense, written_sparse
from bevfusion.deployment._result import ExportedSet, FileLayer
from bevfusion.evaluation import FrameBatches
from bevfusion.model import Detector
from bevfusion.steps import Step, silent_step
from bevquant_export import DetectorExport, export_detector, find_target, note_calibration


def export_whole(
    float_model: Detector,
    quantized_model: Detector,
    batches: FrameBatches,
    folder: Path,
    *,
    target: str = "tensorrt",
    cpu: str = "any",
    measure: bool = False,
    calibration: Sequence[str] = (),
    after_each: Callable[[], None] = lambda: None,
    step: Step = silent_step,
) -> ExportedSet:
    """Write `sparse.onnx` and `dense.onnx` of a detector in other code, and check them.

    Args:
        float_model: The folded model that was quantized.
        quantized_model: The calibrated one.
        batches: At least one; the first is run, all of them bound the number of voxels.
        folder: Made here.
        target: Name of an engine.
        cpu: Where files for a CPU shall run: "vnni" or "any".
        measure: Time each file for a CPU beside its part in float32.
        calibration: Why the ranges cannot be right, for the linter.
        after_each: Called behind the files.
        step: Called around "write ONNX files" and "check ONNX files".

    Raises:
        InputError: Something has no form in a file, or a file computes something else.
    """
    (path,) = quantized_model.part_paths[quantized_model.parts[0]]
    network = quantized_model.get_submodule(path)
    engine = find_target(target)
    if engine.name == "autoware":
        raise InputError(
            "Autoware's plugin takes the encoder of bevfusion alone; export a detector in other "
            "code for tensorrt, onnxruntime or openvino"
        )
    first, *others = batches
    folder.mkdir()
    with step("write ONNX files", ""), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the file begins behind")  # in the file's notes
        try:
            made = export_detector(
                network, first, folder, target,
                batches=others, measure=measure, **engine.fastest(cpu),
            )  # fmt: skip
        except ValueError as error:
            folder.rmdir()  # which it left empty
            raise InputError(f"the model cannot be exported: {error}") from error
    after_each()
    parts = float_model.get_submodule(path), network
    with step("check ONNX files", "the ONNX files cannot be checked"):
        written = list(_written(made, parts, engine.sparse or "libspconv"))
        for item in written:
            note_calibration(item.path, calibration)
        modules = {name for name, _ in network.named_modules()}
        files = tuple(
            exported_file(one, _layers(one, first, f"{path}.", modules)) for one in written
        )
    frame = batches.frame_names[0]
    return ExportedSet(target, folder, files, (), (), frame)


def _layers(
    written: Written, batch: Any, prefix: str, modules: Collection[str]
) -> tuple[FileLayer, ...]:
    """Tensors of a file; those that a module of the network makes by its path in the model."""
    if not written.made.differences:
        return ()
    return tuple(
        replace(row, path=prefix + row.path) if row.path in modules else row
        for row in file_layers(written, batch)
    )


def _written(made: DetectorExport, parts: tuple[Any, Any], dialect: str) -> Iterator[Written]:
    """The files in their order; the last one notes what both make one behind the other."""
    written = []
    for name, kind, file in (("sparse", "sparse", made.sparse), ("dense", "int8", made.dense)):
        if file is not None:
            piece = Piece(FilePart(name, {}, {}, lambda model: model), kind, *parts)
            if kind == "sparse":
                written.append(written_sparse(piece, file, dialect))
            else:
                written.append(written_dense(piece, file, made.target))
    chain = tuple(
        f"one behind the other, {check.frame}: {name}: {text}"
        for check in made.checks
        for name, text in check.rows().items()
    )
    yield from written[:-1]
    yield replace(written[-1], notes=(*written[-1].notes, *chain))
