"""Each file's part of the model in float, fake-quantized and integers, and how it is written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bev_data import InputError
from bevfusion.deployment._autoware import autoware_files
from bevfusion.deployment._files import HEAD, FilePart, HeldPart, ReadPart, files_of
from bevfusion.model import Detector
from bevquant_export import export_float_onnx, export_sparse_onnx, find_target, with_half_constants
from bevquant_int8sim import simulate
from bevquant_quantizers import TensorQuantizer


@dataclass(eq=False)
class Piece:
    """One file's part of the model.

    Attributes:
        file: Which.
        kind: How it is written: "int8", "sparse", "float" or "bpu".
        float_module: In float.
        fake_module: Fake-quantized; the float module if nothing in it is quantized.
        lower: Function from the fake-quantized module and inputs to its integer model; None for
            float parts.
        prefix: Prefix of its modules' paths in the model.
    """

    file: FilePart
    kind: str
    float_module: nn.Module
    fake_module: nn.Module
    lower: Callable[[nn.Module, tuple[Any, ...]], Callable[..., Any]] | None = None
    prefix: str = ""

    @property
    def quantizes_outputs(self) -> bool:
        """Whether it ends with the quantizer of its consumer."""
        return isinstance(self.fake_module, ReadPart)

    def in_float(self, args: tuple[Any, ...]) -> Sequence[Tensor]:
        """Outputs of the float model."""
        return outputs_of(self.float_module, args)

    def fake(self, args: tuple[Any, ...]) -> Sequence[Tensor]:
        """Outputs of the fake-quantized model."""
        return outputs_of(self.fake_module, args)

    def in_integers(self, args: tuple[Any, ...]) -> Sequence[Tensor]:
        """Outputs of the integer model; of the float one where nothing is quantized."""
        if self.lower is None:
            return self.in_float(args)
        return outputs_of(self.lower(self.fake_module, args), args)


def outputs_of(run: Callable[..., Any], args: tuple[Any, ...]) -> Sequence[Tensor]:
    """The outputs of a call, always as several."""
    with torch.no_grad():
        made = run(*args)
    return [made] if isinstance(made, Tensor) else list(made)


def quantizers_on(module: nn.Module) -> dict[str, TensorQuantizer]:
    """Quantizers of a module that quantize, by path."""
    return {
        path: child
        for path, child in module.named_modules()
        if isinstance(child, TensorQuantizer) and not child._disabled and child._if_quant
    }


def nvidia_pieces(
    float_model: Detector, quantized_model: Detector, target: str = "tensorrt"
) -> list[Piece]:
    """The files for TensorRT, libspconv, ONNX Runtime or Autoware, in the order of execution.

    Args:
        float_model: The folded model that was quantized.
        quantized_model: The calibrated one.
        target: Name of an engine.

    Raises:
        InputError: BEVFusion's head is quantized, or Autoware cannot read the model.
    """
    if target == "autoware":
        if "lidar" not in quantized_model.parts:
            raise InputError(
                "the model has no LiDAR branch, and Autoware's plugin is for sparse convolutions: "
                "use a model with one (ptq --branch lidar or lidar-detector)"
            )
        return _pieces(autoware_files(quantized_model), float_model, quantized_model)
    pieces = _pieces(files_of(quantized_model), float_model, quantized_model)
    return _read(pieces, quantized_model) if find_target(target).quantized_outputs else pieces


def _pieces(
    files: Sequence[FilePart], float_model: Detector, quantized_model: Detector
) -> list[Piece]:
    pieces = []
    for file in files:
        fake, plain = file.module(quantized_model), file.module(float_model)
        quantized = bool(quantizers_on(fake))
        if file.name == HEAD and quantized:
            raise InputError(
                "the model's head is quantized, and a file holds that in float alone: its "
                "attention and its choice of queries have no integer form; quantize the other "
                "parts (ptq without --quantize-head, and of another --branch than head)"
            )
        if not quantized:
            plain = fake = _with_weights_of(fake, plain)
        if file.sparse:
            pieces.append(Piece(file, "sparse", plain, fake, _with_constants_of_a_file))
        elif quantized:
            pieces.append(Piece(file, "int8", plain, fake, simulate))
        else:
            pieces.append(Piece(file, "float", plain, plain))
    return pieces


def _read(pieces: list[Piece], model: Detector) -> list[Piece]:
    """The pieces; a single map that the next piece quantizes is passed on quantized."""
    readers = {name: piece for piece in pieces for name in piece.file.inputs.values()}
    paths = {quantizer: path for path, quantizer in quantizers_on(model).items()}
    made = []
    for piece in pieces:
        held, (output, *others) = piece.fake_module, piece.file.outputs.values()
        reader = readers.get(output)
        if piece.kind == "int8" and type(held) is HeldPart and reader and not others:
            inside = quantizers_on(reader.fake_module)
            inputs = [q for path, q in inside.items() if path.endswith("_input_quantizer")]
            if inputs:
                read = ReadPart(held, paths[inputs[0]], inputs[0])
                piece = replace(piece, fake_module=read.eval())
        made.append(piece)
    return made


def _with_weights_of(fake: nn.Module, plain: nn.Module) -> nn.Module:
    """A part that is float in both models, with the weights that training may have given it."""
    own, held = plain.state_dict(), fake.state_dict()
    if all(torch.equal(value, held[name]) for name, value in own.items()):
        return plain
    trained = copy.deepcopy(plain)
    trained.load_state_dict({name: held[name] for name in own})
    return trained


def _with_constants_of_a_file(module: nn.Module, args: tuple[Any, ...]) -> Callable[..., Any]:
    """The integer model with constants as halves, as a sparse file has them."""
    return simulate(with_half_constants(module), args)


@dataclass(frozen=True, eq=False)
class Written:
    """A written file.

    Attributes:
        piece: What it holds.
        path: Its path.
        made: The exporter's result: `QdqFile`, `FloatFile`, `SparseExport` or `AutowareFile`.
        linted: Target for the linter.
        notes: Beside those of `made`.
    """

    piece: Piece
    path: Path
    made: Any
    linted: str
    notes: tuple[str, ...] = ()

    @property
    def returned(self) -> tuple[Tensor, ...]:
        """Outputs of the integer model that the file was compared with; empty if none was run."""
        returned = getattr(self.made, "returned", None)
        return (returned,) if isinstance(returned, Tensor) else tuple(returned or ())


def write_piece(
    piece: Piece,
    args: tuple[Any, ...],
    frames: Sequence[tuple[Any, ...]],
    folder: Path,
    target: str,
    march: str = "bayes",
    cpu: str = "any",
    example: tuple[Any, ...] | None = None,
    measure: bool = False,
) -> Written:
    """Write one file.

    Args:
        piece: The part of the model.
        args: Its inputs on a frame.
        frames: Voxels of all frames, whose number bounds a sparse file's; of a float file its
            inputs on all frames, whose values bound those of half precision.
        folder: Folder of the file.
        target: Name of an engine.
        march: Of a BPU.
        cpu: CPU for which files are written: "vnni" or "any".
        example: Smaller inputs, on which an int8 or sparse piece is captured; the file is compared
            with its integers on `args`.
        measure: Time a quantized or sparse file for a CPU beside its part in float32.

    Raises:
        InputError: The exporter refuses it.
    """
    path, engine = folder / f"{piece.file.name}.onnx", find_target(target)
    names: dict[str, Any] = {
        "input_names": list(piece.file.inputs), "output_names": list(piece.file.outputs)
    }  # fmt: skip
    linted = engine.name
    made: Any
    try:
        if piece.kind == "sparse" and engine.name == "autoware":
            made = _plugin(piece, args, frames, path)
        elif piece.kind == "sparse":
            linted = engine.sparse
            if not linted:
                raise ValueError(
                    f"target {engine.name!r} names none that takes the sparse encoder; "
                    "quantize a model without LiDAR, or give it one as Target.sparse"
                )
            made = export_sparse_onnx(
                _to_write(piece, example), args, path, dialect=linted, batches=frames,
                measure=measure, **find_target(linted).fastest(cpu),
            )  # fmt: skip
        else:
            if engine.name == "autoware":  # what follows the plugin's part is TensorRT's
                engine = find_target(engine.family)
            linted = engine.name
            if piece.kind == "float":
                made = export_float_onnx(
                    piece.float_module, args, path, **names, half=engine.half, frames=frames,
                    tolerance=None,  # compared with torch along with the other files
                )  # fmt: skip
                linted = "onnxruntime" if engine.name == "horizon" else engine.name
            else:
                more = {"march": march} if engine.name == "horizon" else engine.fastest(cpu)
                if measure:  # whose float32 form the integers of an example lack
                    more, example = {**more, "measure": True}, None
                made = engine.write(_to_write(piece, example), args, path, **names, **more)
    except ValueError as error:
        raise InputError(f"{piece.file.name} cannot be exported: {error}") from error
    return Written(_lowered(piece, made), made.path, made, linted, piece.file.notes)


def _to_write(piece: Piece, example: Any) -> Any:
    """The integers that the example makes of a piece, or without one the piece itself."""
    if piece.lower is None or example is None:
        return piece.fake_module
    return piece.lower(piece.fake_module, example)


def _lowered(piece: Piece, made: Any) -> Piece:
    """The piece with the integers that its file was written from."""
    integers = getattr(made, "integer_model", None)
    if piece.lower is None or integers is None:
        return piece
    return replace(piece, lower=lambda module, args: integers)


def _plugin(
    piece: Piece, args: tuple[Any, ...], frames: Sequence[tuple[Any, ...]], path: Path
) -> Any:
    from bevquant_export.targets.autoware import export_autoware_onnx

    return export_autoware_onnx(
        piece.fake_module,
        args,
        path,
        precision="int8" if quantizers_on(piece.fake_module) else "fp16",
        batches=frames,
        output_names=list(piece.file.outputs),
        model_order=piece.file.order,
    )
