"""Each tensor of a written file against the model that it was written from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bevfusion_quant._errors import InputError
from bevfusion_quant.export._files import HEAD
from bevfusion_quant.export._write import Written, outputs_of
from bevfusion_quant.results import BpuLayer, ExportedFile, FileLayer
from bevquant_export import check_tensors, load_sparse_onnx, open_onnx
from bevquant_int8sim import LayerRow

Run = Callable[[tuple[Any, ...]], Sequence[Tensor]]


def runner(written: Written) -> Run:
    """A file as a function of its inputs.

    It runs as `bevquant_export.open_onnx` has it; for libspconv in integers here, for Autoware's
    plugin by the definition of its operators.
    """
    from bevquant_export.targets.autoware import run_on_frame

    file = written.piece.file
    if written.linted == "libspconv":
        sparse: Any = load_sparse_onnx(written.path)
        return lambda args: [sparse(*args)]
    if written.linted == "autoware":

        def plugged(args: tuple[Any, ...]) -> Sequence[Tensor]:
            made = run_on_frame(written.path, args, written.made.permutation)
            return [made[name].float() for name in file.outputs]

        return plugged
    try:
        run = open_onnx(written.path, written.linted)
    except (ImportError, ValueError) as error:
        raise InputError(
            f"{written.path.name} was written, and does not run here: {error}"
        ) from error
    # The sparse one takes the batch size too, and names its output itself.
    names = (*file.inputs, "batch_size")

    def named(args: tuple[Any, ...]) -> Sequence[Tensor]:
        outputs = run(dict(zip(names, args, strict=False)))
        chosen = outputs if written.piece.kind == "sparse" else file.outputs
        return [outputs[name] for name in chosen]

    return named


TOLERANCE = 1e-3  # of float outputs, relative to the largest value
HALF_TOLERANCE = 2e-2  # where all of it is float16
_LOST_QUERIES = 0.02


def file_layers(written: Written, args: tuple[Any, ...]) -> tuple[FileLayer, ...]:
    """What every tensor of a file is, one by one, on the inputs of a frame.

    The exporter has run a quantized or sparse file on these very inputs before it gave it its name;
    a float file is run here.
    """
    piece, name = written.piece, written.path.name
    if piece.kind == "float":
        return tuple(_floats(written, args))
    checks = check_tensors(written.made.differences, same_arithmetic=written.linted == "autoware")
    return tuple(
        FileLayer(
            name, piece.prefix + check.path if check.path else "input",
            **{key: value for key, value in vars(check).items() if key != "path"},
        )
        for check in checks
    )  # fmt: skip


def _floats(written: Written, args: tuple[Any, ...]) -> Iterator[FileLayer]:
    wanted = outputs_of(written.piece.float_module, args)
    got = runner(written)(args)
    tolerance = HALF_TOLERANCE if written.linted == "tensorrt11" else TOLERANCE
    if written.piece.file.name == HEAD:
        got, lost = _matched(wanted, got, tolerance)
        queries = wanted[0].shape[-1]
        yield FileLayer(
            written.path.name, "queries", "choice", "places", queries, lost, float(lost),
            f"{100 * _LOST_QUERIES:g} % of the queries, where scores are equal but for rounding",
            lost <= _LOST_QUERIES * queries,
        )  # fmt: skip
    for name, want, made in zip(written.piece.file.outputs, wanted, got, strict=True):
        largest = _relative(want, made)
        yield FileLayer(
            written.path.name, name, "float", "float", want.numel(), None, largest,
            f"{tolerance:g} of the largest value", largest <= tolerance,
        )  # fmt: skip


def _relative(want: Tensor, made: Tensor) -> float:
    if want.shape != made.shape:
        return float("inf")
    scale = float(want.abs().max()) if want.numel() else 0.0
    largest = float((want - made).abs().max()) if want.numel() else 0.0
    return largest / scale if scale else largest


def _matched(wanted: Any, got: Any, tolerance: float) -> tuple[list[Tensor], int]:
    """The outputs of the head with its queries in the model's order, and how many have no partner.

    Scores that differ by less than rounding may change places, and each other's queries with them.
    """
    both = [
        torch.cat([part[0] / max(float(want.abs().max()), 1e-30) for part, want in pairs]).T
        for pairs in (list(zip(side, wanted, strict=True)) for side in (wanted, got))
    ]
    apart = torch.cdist(both[0].double(), both[1].double(), p=float("inf"))
    nearest = apart.min(1)
    lost = nearest.values > tolerance
    turned = []
    for want, made in zip(wanted, got, strict=True):
        placed = made[..., nearest.indices].clone()
        placed[..., lost] = want[..., lost]
        turned.append(placed)
    return turned, int(lost.sum())


_Figures = tuple[float | None, float | None, int | None]


def beside_layers(
    files: Iterable[ExportedFile], rows: Sequence[LayerRow]
) -> tuple[ExportedFile, ...]:
    """The files with the figures of `bevquant_int8sim.compare` at each of their layers."""
    known: dict[tuple[str, str], list[_Figures]] = defaultdict(list)
    for row in rows:
        figures = row.fake_sqnr_db, row.integer_sqnr_db, row.max_steps
        known[row.path, row.op.partition(" ")[0]].append(figures)
    return _joined(files, known)


def beside_bpu_layers(
    files: Iterable[ExportedFile], rows: Sequence[BpuLayer], paths: Mapping[str, str]
) -> tuple[ExportedFile, ...]:
    """The same of a run for a BPU.

    Args:
        files: Written for it.
        rows: What comparing its executions gave.
        paths: Name of what stands for a function in the unit's graph to its path in the model.
    """
    known: dict[tuple[str, str], list[_Figures]] = defaultdict(list)
    for row in rows:
        scope, _, name = row.layer.rpartition(".")
        key = (scope, "resize") if name.startswith("interpolate") else (row.layer, "")
        known[key].append((row.fake_sqnr_db, row.integer_sqnr_db, row.max_steps))
    named = [
        replace(file, layers=tuple(replace(v, path=paths.get(v.path, v.path)) for v in file.layers))
        for file in files
    ]
    return _joined(named, known)


def _joined(
    files: Iterable[ExportedFile], known: dict[tuple[str, str], list[_Figures]]
) -> tuple[ExportedFile, ...]:
    """Layers of one path and operation are matched in their order."""
    joined = []
    for file in files:
        layers = []
        for layer in file.layers:
            rows = known.get((layer.path, layer.op)) or known.get((layer.path, ""))
            if rows:
                fake, integer, steps = rows.pop(0)
                layer = replace(
                    layer, fake_sqnr_db=fake, integer_sqnr_db=integer, integer_steps=steps
                )
            layers.append(layer)
        joined.append(replace(file, layers=tuple(layers)))
    return tuple(joined)
