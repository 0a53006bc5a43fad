"""A calibrated detector as a set of files: written, linted, run, compared with the model.

Files of bevfusion's own models are its parts. Of a detector in other code, `export_detector` finds
where the sparse part ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bev_data import InputError
from bevfusion.deployment._autoware import AUTOWARE_BOXES
from bevfusion.deployment._check import (
    TOLERANCE,
    box_agreement,
    exported_file,
    file_layers,
    float_layer,
    runner,
    set_stages,
)
from bevfusion.deployment._files import HEAD, LIDAR, POOLED, FilePart
from bevfusion.deployment._pieces import Piece, Written, nvidia_pieces, write_piece
from bevfusion.deployment._result import ExportedFile, ExportedSet, FileLayer
from bevfusion.deployment._walk import between, walk
from bevfusion.evaluation import FrameBatches
from bevfusion.frameworks import with_equal_rows
from bevfusion.model import Detector
from bevfusion.steps import Step, silent_step
from bevquant_export import (
    DetectorExport,
    export_detector,
    export_float_onnx,
    find_target,
    note_calibration,
    open_onnx,
)


def export_files(
    float_model: Detector,
    quantized_model: Detector,
    batches: FrameBatches,
    folder: Path,
    *,
    target: str = "tensorrt",
    cpu: str = "any",
) -> ExportedSet:
    """Write a detector's files, CUDA-BEVFusion's for TensorRT, and check them.

    Each tensor of a file is compared with the integer model's. Then the files run in sequence.
    Differences are in the result's `failures`; the files are there all the same.

    Args:
        float_model: The folded model that was quantized.
        quantized_model: The calibrated one, its head in float.
        batches: At least one; the first is run, all of them bound the number of voxels.
        folder: Made here.
        target: Name of an engine.
        cpu: CPUs that files for a CPU must run on: "vnni" or "any".

    Raises:
        InputError: The head is quantized, or a file cannot be written.
    """
    pieces = nvidia_pieces(float_model, quantized_model, target)
    return export_pieces(pieces, quantized_model, batches, folder, target=target, cpu=cpu)


def export_pieces(
    pieces: Sequence[Piece],
    model: Detector,
    batches: FrameBatches,
    folder: Path,
    *,
    calibration: Sequence[str] = (),
    after_each: Callable[[], None] = lambda: None,
    step: Step = silent_step,
    **how: Any,
) -> ExportedSet:
    """Write the files of these pieces, check each by itself and run them in sequence.

    Args:
        pieces: In the order of execution; see `nvidia_pieces` and `bpu_pieces`.
        model: The quantized one, or any form of it.
        batches: At least one; the first is run, all of them bound the number of voxels.
        folder: Created here.
        calibration: Why the ranges cannot be right, for the linter.
        after_each: Called after each file.
        step: Called around "write", "check" and "run ONNX files".
        **how: target, march, cpu, measure and known of `SetExport`.

    Raises:
        InputError: A file cannot be written.
    """
    made = SetExport(pieces, model, batches, folder, **how)
    with step("write ONNX files", ""):
        made.write(calibration, after_each)
    with step("check ONNX files", "the ONNX files cannot be checked"):
        made.check()
    with step("run ONNX files", "the ONNX files cannot be run one behind the other"):
        return made.run()


class SetExport:
    """Export of a set of files in three steps: `write`, `check` each file, `run` all in sequence.

    Pieces are captured and lowered on a small example. Each file is compared with its integer model
    on the first frame.

    Args:
        pieces: See `export_pieces`, as for model and batches.
        folder: Made by `write`.
        target: Name of an engine.
        march: Of a BPU.
        cpu: CPUs that files for a CPU must run on: "vnni" or "any".
        measure: Time each quantized file for a CPU beside its part in float32.
        known: Tensors that are reused, by "float", "fake" and "integer", such as the result of
            `watching` on the first batch.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        model: Detector,
        batches: FrameBatches,
        folder: Path,
        *,
        target: str,
        march: str = "bayes",
        cpu: str = "any",
        measure: bool = False,
        known: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._pieces = {piece.file.name: piece for piece in pieces}
        self._files = [piece.file for piece in pieces]
        self._model, self._batches = model, batches
        self._folder, self._target, self._march, self._cpu = folder, target, march, cpu
        self._measure = measure
        self._tensors: dict[str, Mapping[str, Tensor]] = dict(known or {})
        if "fake" in self._tensors:  # some are handed on quantized, which they are not in the model
            read = {t for p in pieces if p.quantizes_outputs for t in p.file.outputs.values()}
            given = self._tensors["fake"].items()
            self._tensors["fake"] = {name: value for name, value in given if name not in read}
        self._inputs: dict[str, tuple[Any, ...]] = {}
        self._written: dict[str, Written] = {}
        self._whole: list[Written] = []
        self._rows: tuple[ExportedFile, ...] = ()

    def write(
        self, calibration: Sequence[str] = (), after_each: Callable[[], None] = lambda: None
    ) -> None:
        """Write the files, with the arguments of `export_pieces`.

        Raises:
            InputError: A file cannot be written.
        """
        self._folder.mkdir()
        batch, files, tensors = self._batches[0], self._files, self._tensors
        self._inputs, tensors["fake"] = walk(
            files, self._fake, batch, self._model, known=tensors.get("fake"), wanted=between(files)
        )
        examples = self._examples()
        sparse = any(file.sparse for file in files)
        voxels = [(b.features, b.coords, b.batch_size) for b in self._batches] if sparse else []
        others = self._other_frames()
        for name, piece in self._pieces.items():
            frames = others.get(name, []) if piece.kind == "float" else voxels
            self._written[name] = write_piece(
                piece, self._inputs[name], frames, self._folder, self._target, self._march,
                self._cpu, examples.get(name), self._measure,
            )  # fmt: skip
            after_each()
        written = self._written
        for item in written.values():
            if item.piece.kind != "float":
                note_calibration(item.path, calibration)
        if self._target == "autoware":
            self._whole = join_for_autoware(written, self._model, self._inputs)
        # What a file of the frame's own inputs was held against is the integer model's there.
        made_by_files = {tensor for file in files for tensor in (*file.outputs.values(), POOLED)}
        tensors["integer"] = {
            tensor: value
            for item in written.values()
            if not made_by_files.intersection(item.piece.file.inputs.values())
            for tensor, value in zip(item.piece.file.outputs.values(), item.returned, strict=False)
        }

    def check(self) -> None:
        """Hold every tensor of each file against the model."""
        inputs, written = self._inputs, self._written.items()
        layers = {name: file_layers(item, inputs[name]) for name, item in written}
        self._rows = (
            *(exported_file(item, layers[name]) for name, item in written),
            *(exported_file(item, whole_layers(item, inputs[LIDAR])) for item in self._whole),
        )

    def run(self) -> ExportedSet:
        """Run the files one behind the other; all that was found."""
        written, batches = self._written, self._batches
        stages, integers, onnx = set_stages(
            [written[file.name].piece for file in self._files],
            lambda file, args: runner(written[file.name])(args),
            batches[0],
            self._model,
            self._tensors,
        )
        agreement = box_agreement(self._model, batches.sizes, integers, onnx)
        frame = batches.frame_names[0]
        return ExportedSet(self._target, self._folder, self._rows, stages, agreement, frame)

    def _fake(self, file: FilePart, args: tuple[Any, ...]) -> Sequence[Tensor]:
        return self._pieces[file.name].fake(args)

    def _other_frames(self) -> Mapping[str, list[tuple[Any, ...]]]:
        """Inputs of float files on all frames: their ranges decide the layers in half precision."""
        found: dict[str, list[tuple[Any, ...]]] = {}
        floats = [name for name, piece in self._pieces.items() if piece.kind == "float"]
        if not floats or not find_target(self._target).half:
            return found
        for batch in self._batches:
            wanted = between(self._files)
            inputs, _ = walk(self._files, self._fake, batch, self._model, wanted=wanted)
            for name in floats:
                found.setdefault(name, []).append(inputs[name])
        return found

    def _examples(self) -> Mapping[str, Any]:
        """Parts of the inputs to capture with; sums of 8-bit inputs need all of them."""
        sums = find_target(self._target).fastest(self._cpu).get("integer_sums")
        take: dict[str, Callable[..., Any]] = {"sparse": _few_voxels}
        take |= {} if sums else {"int8": _middle_of}
        return {
            name: take[piece.kind](*self._inputs[name])
            for name, piece in self._pieces.items()
            if piece.kind in take and not _has_fixed_size(piece)
        }


def _has_fixed_size(piece: Piece) -> bool:
    return any(getattr(module, "fixed_size", False) for module in piece.float_module.modules())


_EXAMPLE_CELLS, _EXAMPLE_VOXELS = 64, 2048


def _few_voxels(features: Tensor, coords: Tensor, batch_size: int) -> tuple[Tensor, Tensor, int]:
    """Voxels in the middle of a list of them, which lie beside each other."""
    first = max(len(coords) - _EXAMPLE_VOXELS, 0) // 2
    few = slice(first, first + _EXAMPLE_VOXELS)
    return features[few].contiguous(), coords[few].contiguous(), batch_size


def _middle_of(*maps: Tensor) -> tuple[Tensor, ...]:
    """The middle of the first of maps [frames, (cameras,) channels, x, y]: parts take any size."""
    # Maps of several sizes keep theirs, which have to fit each other.
    grids = {value.shape[-2:] for value in maps}
    for axis, size in enumerate(next(iter(grids)), start=-2) if len(grids) == 1 else ():
        cells = min(_EXAMPLE_CELLS, size)
        maps = tuple(value.narrow(axis, (size - cells) // 2, cells) for value in maps)
    first = (value[(slice(1),) * (value.dim() - 3)] for value in maps)
    return tuple(value.contiguous() for value in first)


WHOLE = "bevfusion_lidar"


def join_for_autoware(
    written: Mapping[str, Written], model: Detector, inputs: Mapping[str, tuple[Any, ...]]
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
    return tuple(
        float_layer(written, name, want.double(), made[name].double(), TOLERANCE)
        for name, want in wanted.items()
    )


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
        batches: See `SetExport`, as for folder, target, cpu and measure.
        folder: Created here.
        target: Name of an engine.
        cpu: CPU for which files are written.
        measure: Time each file for a CPU.
        calibration: See `export_pieces`, as for after_each.
        after_each: Called after the files.
        step: Called around "write ONNX files" and "check ONNX files".

    Raises:
        InputError: Something has no form in a file, or a file computes something else.
    """
    (path,) = quantized_model.part_paths[quantized_model.parts[0]]
    parts = float_model.get_submodule(path), quantized_model.get_submodule(path)
    engine = find_target(target)
    if engine.name == "autoware":
        raise InputError(
            "Autoware's plugin takes the encoder of bevfusion alone; export a detector in other "
            "code for tensorrt, onnxruntime or openvino"
        )
    (first, *others), rows = with_equal_rows(parts[1], list(batches))
    folder.mkdir()
    with step("write ONNX files", ""), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the file begins behind")  # in the file's notes
        try:
            made = export_detector(
                parts[1], first, folder, target,
                batches=others, measure=measure, **engine.fastest(cpu),
            )  # fmt: skip
        except ValueError as error:
            folder.rmdir()  # which it left empty
            raise InputError(f"the model cannot be exported: {error}") from error
    after_each()
    with step("check ONNX files", "the ONNX files cannot be checked"):
        files = []
        for written in _both(made, parts, engine.sparse or "libspconv"):
            note_calibration(written.path, calibration)
            if rows and written.piece.kind == "int8":
                written = replace(written, notes=(*written.notes, rows))
            layers = file_layers(written, first) if written.made.differences else ()
            files.append(exported_file(written, _in_model(layers, path, parts[1])))
    return ExportedSet(target, folder, tuple(files), (), (), batches.frame_names[0])


def _in_model(layers: Iterable[FileLayer], path: str, network: nn.Module) -> tuple[FileLayer, ...]:
    """Tensors that a module of the network computes, by its path in the model."""
    modules = {name for name, _ in network.named_modules()}
    return tuple(replace(v, path=f"{path}.{v.path}") if v.path in modules else v for v in layers)


def _both(made: DetectorExport, parts: tuple[Any, Any], dialect: str) -> list[Written]:
    """The files in their order; the last one notes the results of both in sequence."""
    written = []
    for name, kind, file in (("sparse", "sparse", made.sparse), ("dense", "int8", made.dense)):
        if file is not None:
            piece = Piece(FilePart(name, {}, {}, lambda model: model), kind, *parts)
            linted = dialect if kind == "sparse" else made.target
            written.append(Written(piece, file.path, file, linted))
    chain = tuple(
        f"one behind the other, {check.frame}: {name}: {text}"
        for check in made.checks
        for name, text in check.rows().items()
    )
    return [*written[:-1], replace(written[-1], notes=(*written[-1].notes, *chain))]
