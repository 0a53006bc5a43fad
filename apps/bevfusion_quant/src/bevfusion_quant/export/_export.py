"""A calibrated model as a set of files: written, linted, run, held to the model, listed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bevfusion.deployment import AUTOWARE_BOXES, HEAD, LIDAR, POOLED, FilePart, between, walk
from bevfusion.model import BEVFusion, BEVFusionConfig, example_like
from bevfusion.quantization import relative_change
from bevfusion_quant._errors import InputError
from bevfusion_quant.export._check import (
    TOLERANCE,
    beside_layers,
    box_agreement,
    file_layers,
    runner,
    set_stages,
)
from bevfusion_quant.export._write import (
    Piece,
    Written,
    nvidia_pieces,
    quantizers_on,
    write_piece,
)
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.integer._simulation import lowered
from bevfusion_quant.results import ExportedFile, ExportedSet, FileLayer, FilePort
from bevfusion_quant.run import Clock, return_freed_memory, sha256, versions, write_json
from bevquant_export import export_float_onnx, find_target, lint_onnx, note_calibration, open_onnx
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
    march: str = "bayes",
    cpu: str = "any",
    calibration: Sequence[str] = (),
    known: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> ExportedSet:
    """Write the pieces, run them file by file and one behind the other, and write the manifest.

    Pieces are captured and lowered on a small example; each file is held against its integers on
    the first frame. Tensors of `known` are not made again, see `set_stages`.
    """
    folder.mkdir()
    batch = batches[0]
    files = [piece.file for piece in pieces]
    named = {piece.file.name: piece for piece in pieces}
    tensors: dict[str, Mapping[str, Tensor]] = dict(known or {})

    def run_fake(file: FilePart, args: tuple[Any, ...]) -> Sequence[Tensor]:
        return named[file.name].fake(args)

    with clock.step("write ONNX files"):
        inputs, tensors["fake"] = walk(
            files, run_fake, batch, model, known=tensors.get("fake"), wanted=between(files)
        )
        examples: Mapping[str, Any] = {}
        # What sums read in eight bits has its range on the frame itself.
        small = not find_target(target).fastest(cpu).get("integer_sums")
        if small and any(piece.kind == "int8" for piece in pieces):
            read = {t for p in pieces if p.kind == "int8" for t in p.file.inputs.values()}
            found, _ = walk(files, run_fake, example_like(config, batch), model, wanted=read)
            examples = {name: _middle_of(args) for name, args in found.items() if name != LIDAR}
        voxels = _voxels(batches) if LIDAR in named else []
        written: dict[str, Written] = {}
        for name, piece in named.items():
            example = examples.get(name)
            written[name] = write_piece(
                piece, inputs[name], voxels, folder, target, march, cpu, example
            )
            return_freed_memory()
        for item in written.values():
            if item.piece.kind != "float":
                note_calibration(item.path, calibration)
        whole = join_for_autoware(written, model, inputs) if target == "autoware" else []
    pieces = [written[piece.file.name].piece for piece in pieces]
    # What a file of the frame's own inputs was held against is the integer model's there.
    made_by_files = {tensor for file in files for tensor in (*file.outputs.values(), POOLED)}
    tensors["integer"] = {
        tensor: value
        for item in written.values()
        if not made_by_files.intersection(item.piece.file.inputs.values())
        for tensor, value in zip(item.piece.file.outputs.values(), item.returned, strict=False)
    }
    with clock.step("check ONNX files", blame="the ONNX files cannot be checked"):
        layers = {name: file_layers(item, inputs[name]) for name, item in written.items()}
        rows = tuple(exported_file(item, layers[name]) for name, item in written.items())
        rows += tuple(exported_file(item, whole_layers(item, inputs[LIDAR])) for item in whole)
    with clock.step("run ONNX files", blame="the ONNX files cannot be run one behind the other"):
        stages, integers, onnx = set_stages(
            pieces, lambda file, args: runner(written[file.name])(args), batch, model, tensors
        )
        agreement = box_agreement(model, config, integers, onnx)
    names = [name for _, (name, _) in sorted(batches.names.items())]
    made = ExportedSet(target, folder, rows, stages, agreement, names[0])
    write_manifest(made, command=command, run=run, frames=names, settings=settings)
    return made


_EXAMPLE_CELLS = 64


def _middle_of(maps: tuple[Any, ...]) -> tuple[Any, ...]:
    """What lies in the middle of maps [frames, channels, x, y]: parts between maps take any size.

    Other inputs, and maps of several sizes, are left as they are.
    """
    grids = {value.shape[2:] if value.dim() == 4 else None for value in maps}
    if len(grids) != 1 or None in grids:
        return maps
    for axis in (2, 3):
        size = maps[0].shape[axis]
        cells = min(_EXAMPLE_CELLS, size)
        maps = tuple(value.narrow(axis, (size - cells) // 2, cells) for value in maps)
    return tuple(value.contiguous() for value in maps)


def _voxels(batches: FrameBatches) -> list[tuple[Any, ...]]:
    return [(batch.features, batch.coords, batch.batch_size) for batch in batches]


WHOLE = "bevfusion_lidar"


def join_for_autoware(
    written: Mapping[str, Written], model: BEVFusion, inputs: Mapping[str, tuple[Any, ...]]
) -> list[Written]:
    """Encoder, decoder and packed head in one file; nothing for an encoder alone."""
    if HEAD not in written:
        return []
    from bevquant_export.targets.autoware import join_autoware_onnx

    encoder = written[LIDAR]
    path = encoder.path.with_name(f"{WHOLE}.onnx")
    head = path.with_name(f"{AUTOWARE_BOXES.name}.onnx")
    try:
        export_float_onnx(
            AUTOWARE_BOXES.module(model), inputs[HEAD], head, tolerance=None,
            input_names=list(AUTOWARE_BOXES.inputs), output_names=list(AUTOWARE_BOXES.outputs),
        )  # fmt: skip
        join_autoware_onnx(encoder.path, [written["decoder"].path, head], path)
    finally:
        head.unlink(missing_ok=True)
    file = replace(encoder.piece.file, name=WHOLE, outputs=AUTOWARE_BOXES.outputs)
    parts = ("encoder", "decoder", "head")
    notes = (*encoder.notes, f"{', '.join(parts)} in one file, as the node reads it")
    return [replace(encoder, path=path, piece=replace(encoder.piece, file=file), notes=notes)]


def whole_layers(written: Written, args: tuple[Any, ...]) -> tuple[FileLayer, ...]:
    """Boxes of the whole file against its parts, in onnxruntime, on the map of its encoder."""
    from bevquant_export.targets.autoware import behind_encoder, run_on_frame

    parts = {name: written.path.with_name(f"{name}.onnx") for name in (LIDAR, "decoder", HEAD)}
    (name,) = written.made.outputs
    lidar = run_on_frame(parts[LIDAR], args, written.made.permutation)[name]
    made = open_onnx(behind_encoder(written.path, name))({name: lidar})
    found = open_onnx(parts[HEAD])(open_onnx(parts["decoder"])({"lidar": lidar.float()}))
    score, label = found["score"][0].max(0)
    boxes = [found[name][0] for name in ("reg", "height", "dim", "rot", "vel")]
    wanted = {"bbox_pred": torch.cat(boxes), "score": score, "label_pred": label}
    rows = []
    for name, want in wanted.items():
        largest = relative_change(want.double(), made[name].double())
        row = FileLayer(
            written.path.name, name, "float", "float", want.numel(), None, largest,
            f"{TOLERANCE:g} of the largest value", largest <= TOLERANCE,
        )  # fmt: skip
        rows.append(row)
    return tuple(rows)


MANIFEST = "manifest.json"
MANIFEST_FORMAT, MANIFEST_VERSION = "bevfusion-quant export", 1
_TOOLS = ("bevquant-export", "bevquant-hybrid", "onnx", "onnxruntime", "onnxscript")


def exported_file(written: Written, layers: tuple[FileLayer, ...]) -> ExportedFile:
    """One row of the set, read back from the file that was written."""
    import onnx

    proto = onnx.load(written.path)
    opset = next(o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))
    kind = written.piece.kind
    engine = find_target(written.linted)
    quantized = bool(kind == "int8" or quantizers_on(written.piece.fake_module))
    return ExportedFile(
        name=written.path.name,
        kind=kind,
        runs_on=engine.title,
        build="; ".join(engine.commands(written.path, quantized=quantized)),
        size=written.path.stat().st_size,
        sha256=sha256(written.path),
        companions={p.name: sha256(p) for p in _companions(written)},
        opset=opset,
        inputs=tuple(map(_port, proto.graph.input)),
        outputs=tuple(map(_port, proto.graph.output)),
        ranges={} if kind == "float" else _ranges(written),
        voxel_bound=written.voxel_bound,
        runs_in_float=written.runs_in_float,
        notes=written.notes,
        findings=tuple(map(str, lint_onnx(written.path, written.linted))),
        layers=layers,
        unverified=engine.unverified,
    )


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


def _port(port: Any) -> FilePort:
    import onnx

    tensor = port.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    shape = tuple(d.dim_param or d.dim_value for d in tensor.shape.dim)
    return FilePort(port.name, str(dtype), shape)


def _companions(written: Written) -> list[Path]:
    settings = getattr(written.made, "settings", None)
    return [] if settings is None else [settings]


def _ranges(written: Written) -> dict[str, float]:
    """Activations' ranges, by the path of the first quantizer that has each."""
    return {
        path: float(q.amax)
        for path, q in quantizers_on(written.piece.fake_module).items()
        if q.axis is None and q.amax is not None and not path.endswith("_weight_quantizer")
    }
