"""Writing each file in the form that its engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bevfusion_quant._errors import InputError
from bevfusion_quant.export._pieces import quantizers_on

if TYPE_CHECKING:
    from bevfusion_quant.export._pieces import Piece


@dataclass(frozen=True, eq=False)
class Written:
    """A file that was written.

    Attributes:
        piece: What it holds.
        path: Where it lies.
        made: What the exporter said: `QdqFile`, `FloatFile` or `SparseExport`.
        linted: Target that the linter knows it by.
        voxel_bound: Of a sparse file.
        runs_in_float: What in a quantized file runs in float.
        notes: Of the exporter.
        returned: What the integer model that it was held against makes of the inputs; empty where
            none was run on them.
    """

    piece: Piece
    path: Path
    made: Any
    linted: str
    voxel_bound: int | None = None
    runs_in_float: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    returned: tuple[Tensor, ...] = ()


def write_piece(
    piece: Piece,
    args: tuple[Any, ...],
    frames: Sequence[tuple[Any, ...]],
    folder: Path,
    target: str,
    march: str = "bayes",
    cpu: str = "any",
    example: tuple[Any, ...] | None = None,
) -> Written:
    """Write one file.

    Args:
        piece: What.
        args: Its inputs on a frame.
        frames: Voxels of all frames, whose number bounds a sparse file's.
        folder: Where.
        target: Name of an engine.
        march: Of a BPU.
        cpu: Where files for a CPU shall run: "vnni" or "any".
        example: Smaller inputs, on which an int8 piece is captured; the file is held against its
            integers on `args`.

    Raises:
        InputError: The exporter refuses it.
    """
    path = folder / f"{piece.file.name}.onnx"
    engine = engine_of(target)
    try:
        if piece.kind == "sparse" and engine.name == "autoware":
            return _plugin(piece, args, frames, path)
        if engine.name == "autoware":  # what follows the plugin's part is TensorRT's
            engine = engine_of(engine.family)
        if piece.kind == "sparse":
            return _sparse(piece, args, frames, path, engine, cpu)
        if piece.kind == "float":
            return _float(piece, args, path, engine)
        more = {"march": march} if engine.name == "horizon" else engine.fastest(cpu)
        return _quantized(piece, args, path, engine, more, example)
    except ValueError as error:
        raise InputError(f"{piece.file.name} cannot be exported: {error}") from error


def engine_of(target: str) -> Any:
    """The `bevquant_export.Target` of a target of this command."""
    from bevquant_export import find_target

    return find_target(target)


def _quantized(
    piece: Piece, args: tuple[Any, ...], path: Path, engine: Any, more: Any, example: Any
) -> Written:
    model: Any = piece.fake_module
    if piece.lower is not None and example is not None:
        model = piece.lower(model, example)
    made = engine.write(
        model,
        args,
        path,
        input_names=list(piece.file.inputs),
        output_names=list(piece.file.outputs),
        **more,
    )
    return Written(
        _lowered(piece, made),
        path,
        made,
        engine.name,
        runs_in_float=tuple(made.floats),
        notes=tuple(made.notes),
        returned=_tensors(made.returned),
    )


def _tensors(made: Any) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else tuple(made or ())


def _lowered(piece: Piece, made: Any) -> Piece:
    """The piece with the integers that its file was written from."""
    integers = made.integer_model
    if piece.lower is None or integers is None:
        return piece
    return replace(piece, lower=lambda module, args: integers)


def _float(piece: Piece, args: tuple[Any, ...], path: Path, engine: Any) -> Written:
    from bevquant_export import export_float_onnx

    made = export_float_onnx(
        piece.float_module,
        args,
        path,
        input_names=list(piece.file.inputs),
        output_names=list(piece.file.outputs),
        tolerance=None,  # held against torch along with the other files
        half=engine.half,
    )
    return Written(piece, path, made, "onnxruntime" if engine.name == "horizon" else engine.name)


def _plugin(
    piece: Piece, args: tuple[Any, ...], frames: Sequence[tuple[Any, ...]], path: Path
) -> Written:
    from bevquant_export.targets.autoware import export_autoware_onnx

    integers = bool(quantizers_on(piece.fake_module))
    made = export_autoware_onnx(
        piece.fake_module,
        args,
        path,
        precision="int8" if integers else "fp16",
        batches=frames,
        output_names=list(piece.file.outputs),
    )
    floats = tuple(f"{layer}: fp16" for layer, form in made.layers.values() if form != "int8")
    once, alone = made.pair_generations
    notes = (f"{once} pair generations for {alone} layers",)
    return Written(piece, path, made, "autoware", made.voxel_bound, floats, notes)


def _sparse(
    piece: Piece,
    args: tuple[Any, ...],
    frames: Sequence[tuple[Any, ...]],
    path: Path,
    engine: Any,
    cpu: str,
) -> Written:
    from bevquant_export import export_sparse_onnx, find_target

    dialect = engine.sparse
    if not dialect:
        raise ValueError(
            f"target {engine.name!r} names none that takes the sparse encoder; quantize a model "
            "without LiDAR, or give it one as Target.sparse"
        )
    more = find_target(dialect).fastest(cpu)
    made = export_sparse_onnx(
        piece.fake_module, args, path, dialect=dialect, batches=frames, **more
    )
    bounds = [layer.output_bound for layer in made.layers if layer.output_bound is not None]
    floats = tuple(
        f"{layer.path}: fp16: its input or weight is not quantized"
        for layer in made.layers
        if layer.precision != "int8"
    )
    piece = _lowered(piece, made)
    if dialect == "portable":  # takes any number of voxels
        linted, bound = "portable", None
    else:
        linted, bound = "libspconv", max(bounds, default=None)
    return Written(
        piece, path, made, linted,
        voxel_bound=bound, runs_in_float=floats, returned=_tensors(made.returned),
    )  # fmt: skip
