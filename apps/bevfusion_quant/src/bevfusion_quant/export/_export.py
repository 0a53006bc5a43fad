"""A calibrated model as a set of files: written, linted, run and held against the model."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bevfusion_quant._errors import InputError
from bevfusion_quant.export._autoware import join_for_autoware, whole_layers
from bevfusion_quant.export._chain import box_agreement, set_stages, walk
from bevfusion_quant.export._check import beside_layers, file_layers, runner
from bevfusion_quant.export._files import LIDAR
from bevfusion_quant.export._manifest import exported_file, write_manifest
from bevfusion_quant.export._pieces import nvidia_pieces
from bevfusion_quant.export._write import engine_of, write_piece
from bevfusion_quant.results import ExportedSet
from bevfusion_quant.steps import example_like

if TYPE_CHECKING:
    from torch import Tensor

    from bevfusion.model import BEVFusion, BEVFusionConfig
    from bevfusion_quant.export._files import FilePart
    from bevfusion_quant.export._pieces import Piece
    from bevfusion_quant.frames import FrameBatches
    from bevfusion_quant.run import Clock
    from bevquant_int8sim import LayerRow

__all__ = ["ONNX_FOLDER", "check_libraries", "export_model", "export_pieces", "missing_libraries"]

ONNX_FOLDER = "onnx"

LIBRARIES = ("onnx", "onnxruntime", "onnxscript")


def missing_libraries() -> str:
    """What writing and checking files needs and is not installed, or nothing."""
    return ", ".join(name for name in LIBRARIES if importlib.util.find_spec(name) is None)


def check_libraries() -> None:
    """Raises InputError where a library is missing."""
    if missing := missing_libraries():
        raise InputError(f"export needs {missing}: pip install 'bevfusion-quant[export]'")


def export_model(
    float_model: BEVFusion,
    quantized_model: BEVFusion,
    batches: FrameBatches,
    config: BEVFusionConfig,
    clock: Clock,
    folder: Path,
    *,
    target: str,
    cpu: str = "any",
    layers: Sequence[LayerRow] = (),
    command: str = "",
    run: str = "",
    settings: Mapping[str, Any] | None = None,
    calibration: Sequence[str] = (),
) -> ExportedSet:
    """Write the set for TensorRT with libspconv, or for ONNX Runtime, to `folder` and check it.

    Args:
        float_model: The folded model that was quantized.
        quantized_model: The calibrated one.
        batches: At least one; the first is run, all of them bound the number of voxels.
        config: Sizes.
        clock: Times the steps.
        folder: Made here; holds the files and manifest.json.
        target: Name of an engine.
        cpu: Where files for a CPU shall run: "vnni" or "any".
        layers: Of `bevquant_int8sim.compare`, to stand beside the files' tensors; compared on the
            first batch where none are given.
        command: The command line that repeats it, for the manifest.
        run: The run that is exported, for the manifest.
        settings: What else decides the result, for the manifest.
        calibration: Why the ranges cannot be right, for whoever lints the files.

    Raises:
        InputError: A library is missing, the head is quantized, or a file cannot be written.
    """
    check_libraries()
    pieces = nvidia_pieces(float_model, quantized_model, target)
    made = export_pieces(
        pieces, quantized_model, batches, config, clock, folder,
        target=target, cpu=cpu, command=command, run=run, settings=settings or {},
        calibration=calibration,
    )  # fmt: skip
    rows = layers or _compared(float_model, quantized_model, batches, config, clock)
    return replace(made, files=beside_layers(made.files, rows))


def _compared(
    float_model: BEVFusion,
    quantized_model: BEVFusion,
    batches: FrameBatches,
    config: BEVFusionConfig,
    clock: Clock,
) -> Sequence[LayerRow]:
    from bevfusion_quant.integer._simulation import lowered
    from bevquant_int8sim import compare

    with clock.step("compare layers", blame="float and integer model cannot be compared"):
        model = lowered(quantized_model, example_like(config, batches[0]), "auto")
        return compare(float_model, model, [tuple(batches[0])]).rows


def export_pieces(
    pieces: Sequence[Piece],
    model: BEVFusion,
    batches: FrameBatches,
    config: BEVFusionConfig,
    clock: Clock,
    folder: Path,
    *,
    target: str,
    command: str,
    run: str,
    settings: Mapping[str, Any],
    march: str = "bayes",
    cpu: str = "any",
    calibration: Sequence[str] = (),
) -> ExportedSet:
    """Write the pieces, run them file by file and one behind the other, and write the manifest.

    Pieces are captured and lowered on a small example; each file is held against its integers on
    the first frame.
    """
    from bevquant_export import note_calibration

    folder.mkdir()
    batch = batches[0]
    files = [piece.file for piece in pieces]
    known = {piece.file.name: piece for piece in pieces}

    def run_fake(file: FilePart, args: tuple[Any, ...]) -> Sequence[Tensor]:
        return known[file.name].fake(args)

    with clock.step("write ONNX files"):
        inputs, fake = walk(files, run_fake, batch, model)
        examples: Mapping[str, Any] = {}
        # What sums read in eight bits has its range on the frame itself.
        small = not engine_of(target).fastest(cpu).get("integer_sums")
        if small and any(piece.kind == "int8" for piece in pieces):
            examples, _ = walk(files, run_fake, example_like(config, batch), model)
        voxels = _voxels(batches) if LIDAR in known else []
        written = {
            name: write_piece(
                piece, inputs[name], voxels, folder, target, march, cpu, examples.get(name)
            )
            for name, piece in known.items()
        }
        for item in written.values():
            if item.piece.kind != "float":
                note_calibration(item.path, calibration)
        whole = join_for_autoware(written, model, inputs) if target == "autoware" else []
    pieces = [written[piece.file.name].piece for piece in pieces]
    with clock.step("check ONNX files", blame="the ONNX files cannot be checked"):
        layers = {name: file_layers(item, inputs[name]) for name, item in written.items()}
        rows = tuple(exported_file(item, layers[name]) for name, item in written.items())
        rows += tuple(exported_file(item, whole_layers(item, inputs[LIDAR])) for item in whole)
    with clock.step("run ONNX files", blame="the ONNX files cannot be run one behind the other"):
        stages, integers, onnx = set_stages(
            pieces, lambda file, args: runner(written[file.name])(args), batch, model, fake
        )
        agreement = box_agreement(model, config, integers, onnx)
    names = [name for _, (name, _) in sorted(batches.names.items())]
    made = ExportedSet(target, folder, rows, stages, agreement, names[0])
    write_manifest(made, command=command, run=run, frames=names, settings=settings)
    return made


def _voxels(batches: FrameBatches) -> list[tuple[Any, ...]]:
    return [(batch.features, batch.coords, batch.batch_size) for batch in batches]
