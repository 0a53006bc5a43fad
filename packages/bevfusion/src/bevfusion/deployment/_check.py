"""Written files against the model: each tensor of a file, and the files one behind the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bev_data import InputError
from bev_data.metrics import AgreementRow
from bevfusion.deployment._files import HEAD
from bevfusion.deployment._pieces import Piece, Written, outputs_of, quantizers_on
from bevfusion.deployment._result import ExportedFile, FileLayer, FilePort, SetStage
from bevfusion.deployment._walk import STAGE_ENDS, Execute, between, file_boxes, walk
from bevfusion.evaluation import agreement_accumulator
from bevfusion.model import Batch, Detector, Sizes
from bevfusion.quantization import STAGE_TITLES, relative_change
from bevquant_export import (
    check_tensors,
    compare_qdq_onnx,
    find_target,
    lint_onnx,
    load_sparse_onnx,
    open_onnx,
)
from bevquant_int8sim import LayerRow
from bevquant_qnn import PairSums
from bevquant_quantizers.documents import sha256

Run = Callable[[tuple[Any, ...]], Sequence[Tensor]]


def runner(written: Written) -> Run:
    """A file as a function of its inputs."""
    from bevquant_export.targets.autoware import run_on_frame

    file = written.piece.file
    # Integers for libspconv run here, Autoware's plugin by the definition of its operators.
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


def exported_file(written: Written, layers: tuple[FileLayer, ...]) -> ExportedFile:
    """One row of the set, read back from the file that was written."""
    import onnx

    proto = onnx.load(written.path)
    opset = next(o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))
    kind, made = written.piece.kind, written.made
    engine = find_target(written.linted)
    settings = getattr(made, "settings", None)
    timing = getattr(getattr(made, "figures", None), "timing", None)
    quantized = bool(kind == "int8" or quantizers_on(written.piece.fake_module))
    return ExportedFile(
        name=written.path.name,
        kind=kind,
        runs_on=engine.title,
        build=written.piece.file.build
        or "; ".join(engine.commands(written.path, quantized=quantized)),
        size=written.path.stat().st_size,
        sha256=sha256(written.path),
        companions={} if settings is None else {settings.name: sha256(settings)},
        opset=opset,
        inputs=tuple(map(_port, proto.graph.input)),
        outputs=tuple(map(_port, proto.graph.output)),
        ranges={} if kind == "float" else _ranges(written),
        # A portable file takes any number of voxels.
        voxel_bound=None if engine.name == "portable" else getattr(made, "voxel_bound", None),
        runs_in_float=tuple(getattr(made, "floats", ())),
        notes=(*made.notes, *written.notes),
        findings=tuple(map(str, lint_onnx(written.path, written.linted))),
        layers=layers,
        unverified=engine.unverified,
        milliseconds=None if timing is None else timing.milliseconds,
        float_milliseconds=None if timing is None else timing.float_milliseconds,
    )


def _port(port: Any) -> FilePort:
    import onnx

    tensor = port.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    shape = tuple(d.dim_param or d.dim_value for d in tensor.shape.dim)
    return FilePort(port.name, str(dtype), shape)


def _ranges(written: Written) -> dict[str, float]:
    """Activations' ranges, by the path of the first quantizer that has each."""
    return {
        path: float(q.amax)
        for path, q in quantizers_on(written.piece.fake_module).items()
        if q.axis is None and q.amax is not None and not path.endswith("_weight_quantizer")
    }


TOLERANCE = 1e-3  # of float outputs, relative to the largest value
HALF_TOLERANCE = 2e-2  # where all of it is float16
_LOST_QUERIES = 0.02


def file_layers(written: Written, args: tuple[Any, ...]) -> tuple[FileLayer, ...]:
    """Compare every tensor of a file with the model on a frame's inputs."""
    piece, name = written.piece, written.path.name
    if piece.kind == "float":
        return tuple(_floats(written, args))
    # The exporter has run a quantized or sparse file on these very inputs before it gave it its
    # name; not so one of another package's engine.
    rows = written.made.differences
    if not rows and piece.kind != "sparse":
        rows = compare_qdq_onnx(written.made, piece.fake_module, args)
    checks = check_tensors(rows, same_arithmetic=written.linted == "autoware")
    paths = (piece.prefix + check.path if check.path else "input" for check in checks)
    pairs = zip(checks, paths, strict=True)
    return tuple(FileLayer(**(vars(check) | {"path": path}), file=name) for check, path in pairs)


def _floats(written: Written, args: tuple[Any, ...]) -> Iterator[FileLayer]:
    wanted = outputs_of(written.piece.float_module, args)
    got = runner(written)(args)
    tolerance = HALF_TOLERANCE if written.linted == "tensorrt11" else TOLERANCE
    if written.piece.file.name == HEAD:
        got, lost = _matched(wanted, got, tolerance)
        queries = wanted[0].shape[-1]
        yield FileLayer(
            "queries", "choice", "places", queries, lost, float(lost),
            f"{100 * _LOST_QUERIES:g} % of the queries, where scores are equal but for rounding",
            lost <= _LOST_QUERIES * queries, file=written.path.name,
        )  # fmt: skip
    for name, want, made in zip(written.piece.file.outputs, wanted, got, strict=True):
        yield float_layer(written, name, want, made, tolerance)


def float_layer(
    written: Written, name: str, wanted: Tensor, made: Tensor, tolerance: float
) -> FileLayer:
    """A float output of a file beside torch's."""
    largest = relative_change(wanted, made)
    return FileLayer(
        name, "float", "float", wanted.numel(), None, largest,
        f"{tolerance:g} of the largest value", largest <= tolerance, file=written.path.name,
    )  # fmt: skip


def _matched(wanted: Any, got: Any, tolerance: float) -> tuple[list[Tensor], int]:
    """The head's outputs with their queries in the model's order; how many have no partner."""
    # Scores that differ by less than rounding may change places, and each other's queries with
    # them: queries are paired by all of their values.
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
        # A query without a partner is counted, and compared no further.
        placed[..., lost] = want[..., lost]
        turned.append(placed)
    return turned, int(lost.sum())


Figures = tuple[float | None, float | None, int | None]
"""SQNR of the fake-quantized and of the integer model against float, and their largest steps."""


def beside_layers(
    files: Iterable[ExportedFile], rows: Sequence[LayerRow]
) -> tuple[ExportedFile, ...]:
    """The files with the figures of `bevquant_int8sim.compare` at each of their layers."""
    known: dict[tuple[str, str], list[Figures]] = defaultdict(list)
    for row in rows:
        figures = row.fake_sqnr_db, row.integer_sqnr_db, row.max_steps
        known[row.path, row.op.partition(" ")[0]].append(figures)
    return join_figures(files, known)


def join_figures(
    files: Iterable[ExportedFile], known: Mapping[tuple[str, str], list[Figures]]
) -> tuple[ExportedFile, ...]:
    """The files with figures at their layers.

    Args:
        files: Of a set.
        known: Path and operation, or path and "" for any, to the figures of such layers in their
            order; those that find a layer are taken out.
    """
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


_SLACK_DB, _ENOUGH_DB = 0.5, 40.0


def set_stages(
    pieces: Sequence[Piece],
    onnx: Execute,
    batch: Batch,
    model: Detector,
    known: Mapping[str, Mapping[str, Tensor]],
) -> tuple[tuple[SetStage, ...], dict[str, Tensor], dict[str, Tensor]]:
    """Run a frame in float, in integers and through the files; compare the tensors between them.

    Returns the stages, and all tensors of the integer model and of the files.
    """
    files = [piece.file for piece in pieces]
    named = {piece.file.name: piece for piece in pieces}
    runs: dict[str, Execute] = {
        "float": lambda file, args: named[file.name].in_float(args),
        "integer": lambda file, args: named[file.name].in_integers(args),
        "onnx": onnx,
    }
    made = {"fake": dict(known["fake"])}
    for name, run in runs.items():
        needed = between(files) if name == "float" else None
        _, made[name] = walk(files, run, batch, model, known=known.get(name), wanted=needed)
    stages = []
    for tensor, stage in STAGE_ENDS.items():
        if all(tensor in tensors for tensors in made.values()):
            wanted = made["float"][tensor]
            fake_db, integer_db, onnx_db = (
                _sqnr_db(wanted, made[name][tensor]) for name in ("fake", "integer", "onnx")
            )
            right = _is_right(integer_db, onnx_db)
            stages.append(
                SetStage(tensor, STAGE_TITLES[stage], fake_db, integer_db, onnx_db, right)
            )
    return tuple(stages), made["integer"], made["onnx"]


def _sqnr_db(wanted: Tensor, got: Tensor) -> float | None:
    sums = PairSums()
    sums.add(wanted, got)
    return sums.sqnr_db


def _is_right(integer_db: float | None, onnx_db: float | None) -> bool:
    """Single steps that engines round otherwise grow on the way, but cost next to nothing."""
    if onnx_db is None:
        return True
    return onnx_db >= min(_ENOUGH_DB if integer_db is None else integer_db, _ENOUGH_DB) - _SLACK_DB


def box_agreement(
    model: Detector, config: Sizes, integers: Mapping[str, Tensor], onnx: Mapping[str, Tensor]
) -> tuple[AgreementRow, ...]:
    """Boxes of the integer model against those of the files; the former stand first in each row."""
    if "head" not in model.parts or not {"score", "heatmap_0"}.intersection(onnx):
        return ()
    accumulator = agreement_accumulator(config)
    accumulator.add(file_boxes(model, integers), file_boxes(model, onnx), None)
    return tuple(accumulator.agreement())
