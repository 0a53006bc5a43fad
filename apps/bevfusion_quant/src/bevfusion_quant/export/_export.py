"""A calibrated model as a set of files: written, linted, run, held to the model, listed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from bevfusion import deployment
from bevfusion.deployment import ExportedFile, ExportedSet, Piece, SetExport, beside_layers
from bevfusion.model import BEVFusion, BEVFusionConfig, example_like
from bevfusion_quant._errors import InputError, VerificationError
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.integer import lowered
from bevfusion_quant.run import Clock, return_freed_memory, versions, write_json
from bevquant_int8sim import LayerRow, compare

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
    known: Mapping[str, Mapping[str, Tensor]] | None = None,
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
        known: What `watching` found of both models on the first batch, by ``"float"`` and
            ``"fake"``; they are run where it is not given.

    Raises:
        InputError: A library is missing, the head is quantized, or a file cannot be written.
    """
    check_libraries()
    pieces = nvidia_pieces(float_model, quantized_model, target)
    made = export_pieces(
        pieces, quantized_model, batches, config, clock, folder,
        target=target, cpu=cpu, command=command, run=run, settings=settings or {},
        calibration=calibration, known=known or {},
    )  # fmt: skip
    rows = layers or _compared(float_model, quantized_model, batches, config, clock)
    return replace(made, files=beside_layers(made.files, rows))


def nvidia_pieces(
    float_model: BEVFusion, quantized_model: BEVFusion, target: str = "tensorrt"
) -> list[Piece]:
    """`bevfusion.deployment.nvidia_pieces` whose errors name the options of the commands."""
    told = {
        "no lidar": "the run has no LiDAR branch, and Autoware's plugin is for sparse "
        "convolutions: quantize with ptq --branch lidar or lidar-detector",
        "head": "the run quantizes the head, and a file holds that in float alone: its attention "
        "and its choice of queries have no integer form; export a run of ptq without "
        "--quantize-head and of another --branch than head",
    }
    return deployment.nvidia_pieces(float_model, quantized_model, target, refusals=told)


def _compared(
    float_model: BEVFusion,
    quantized_model: BEVFusion,
    batches: FrameBatches,
    config: BEVFusionConfig,
    clock: Clock,
) -> Sequence[LayerRow]:
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
    calibration: Sequence[str] = (),
    **how: Any,
) -> ExportedSet:
    """Write the pieces, run them file by file and one behind the other, and write the manifest.

    Args:
        pieces: In the order of execution.
        model: Any form of the model.
        batches: At least one.
        config: Sizes.
        clock: Times the steps.
        folder: Made here.
        target: Name of an engine.
        command: The command line that repeats it, for the manifest.
        run: The run that is exported, for the manifest.
        settings: What else decides the result, for the manifest.
        calibration: Why the ranges cannot be right.
        **how: march, cpu and known of `bevfusion.deployment.SetExport`.
    """
    made = SetExport(pieces, model, batches, config, folder, target=target, **how)
    with clock.step("write ONNX files"):
        made.write(calibration, after_each=return_freed_memory)
    with clock.step("check ONNX files", blame="the ONNX files cannot be checked"):
        made.check()
    with clock.step("run ONNX files", blame="the ONNX files cannot be run one behind the other"):
        found = made.run()
    frames = batches.frame_names
    write_manifest(found, command=command, run=run, frames=frames, settings=settings)
    return found


def refuse_wrong_files(made: ExportedSet, text: str) -> None:
    """End a command where files do not compute what the model does.

    Raises:
        VerificationError: After `text`, the first of what differs.
    """
    if not made.failures:
        return
    more = f" and {len(made.failures) - 1} more" if len(made.failures) > 1 else ""
    raise VerificationError(
        f"the ONNX files in {made.folder} are not what the model computes: "
        f"{made.failures[0]}{more}: do not deploy them; the page shows every layer",
        text,
    )


MANIFEST = "manifest.json"
MANIFEST_FORMAT, MANIFEST_VERSION = "bevfusion-quant export", 1
_TOOLS = ("bevquant-export", "bevquant-hybrid", "onnx", "onnxruntime", "onnxscript")


def write_manifest(
    made: ExportedSet, *, command: str, run: str, frames: Sequence[str], settings: Mapping[str, Any]
) -> Path:
    """Write manifest.json beside the files.

    Args:
        made: The set.
        command: The command line that repeats it.
        run: The run that was exported.
        frames: Names of the frames that it was checked and bounded on.
        settings: What else decides the result.
    """
    content = {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "target": made.target,
        "run": run,
        "command": command,
        "settings": settings,
        "versions": versions(*_TOOLS),
        "frames": list(frames),
        "verified": not made.failures,
        "failures": made.failures,
        "files": [_entry(file) for file in made.files],
        "chain": {"frame": made.frame, "stages": made.stages, "boxes": made.agreement},
    }
    return write_json(made.folder / MANIFEST, content)


def _entry(file: ExportedFile) -> dict[str, Any]:
    """The row with its layers in short: how many are right, and those that are not equal."""
    entry = asdict(file)
    layers = entry.pop("layers")
    entry["checked"] = {
        "tensors": len(layers),
        "wrong": sum(not layer["is_right"] for layer in layers),
        "different": [
            {key: layer[key] for key in ("path", "op", "elements", "different", "ties", "largest")}
            for layer in layers
            if layer["largest"]
        ],
    }
    return entry
