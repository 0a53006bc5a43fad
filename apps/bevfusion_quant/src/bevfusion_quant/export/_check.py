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
from bevquant_export import compare_qdq_onnx, compare_sparse_onnx, load_sparse_onnx, open_onnx
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
_EXACT = frozenset({"max_pool", "move", "relu", "constant"})
# What is computed again, value by value: no difference but ties, where a float32 product
# within its own rounding of half a step may fall to either side.
_RECOMPUTED = frozenset({"conv", "conv_transpose", "linear", "add", "requantize", "resize"})
# Share of the other values that may be a step off.
_SHARES = {"quantize": 1e-6}
_OTHERS, _FEW = 1e-4, 4
_LOST_QUERIES = 0.02
# Of int8 layers behind float32 sums of another order, and of the result behind those.
_BEHIND_FLOATS, _STEPS, _LOOSE = 0.01, 3, 0.1
_SPARSE_OPS = {"conv": "sparse_conv", "relu": "add"}


def file_layers(written: Written, args: tuple[Any, ...]) -> tuple[FileLayer, ...]:
    """What every tensor of a file is, one by one, on the inputs of a frame.

    Quantized files: each operation reads the simulator's integers, so a difference is counted where
    it arises. Sparse files: layer by layer behind one another. Float files: their outputs.
    """
    checks: dict[str, Callable[[Written, tuple[Any, ...]], Iterator[FileLayer]]] = {
        "int8": _integers, "bpu": _integers, "sparse": _sparse, "float": _floats,
    }  # fmt: skip
    return tuple(checks[written.piece.kind](written, args))


def _integers(written: Written, args: tuple[Any, ...]) -> Iterator[FileLayer]:
    # The exporter has run the file on these very inputs before it gave it its name.
    rows = written.made.differences
    for row in rows or compare_qdq_onnx(written.made, written.piece.fake_module, args):
        exact = row.op in _EXACT or row.op in _RECOMPUTED
        share = 0.0 if exact else _SHARES.get(row.op, _OTHERS)
        allowed = max(_FEW, int(share * row.elements)) if share else 0
        said = "nothing" if row.op in _EXACT else "one step on the border of two"
        said += f", and on {allowed:,} values" if share else ""
        yield FileLayer(
            written.path.name,
            written.piece.prefix + row.path if row.path else "input",
            row.op,
            "int8",
            row.elements,
            row.different,
            float(row.largest),
            said,
            row.unexplained <= allowed and row.largest <= 1,
            ties=row.ties,
        )


def _sparse(written: Written, args: tuple[Any, ...]) -> Iterator[FileLayer]:
    if written.linted == "autoware":
        yield from _plugin(written, args)
        return
    backend = "auto" if written.linted == "libspconv" else "onnxruntime"
    # The exporter has run the file on these very inputs before it gave it its name.
    rows = written.made.differences
    if not rows:
        file = load_sparse_onnx(written.path, backend=backend)
        rows = compare_sparse_onnx(file, written.piece.fake_module, args)
    floats_differ = False  # of layers in fp16, whose float32 sums another order rounds otherwise
    for row in rows:
        is_int8 = row.form == "int8"
        largest = float(row.largest) if is_int8 else row.largest / (row.size or 1.0)
        floats_differ |= not is_int8 and row.different > 0
        few = _BEHIND_FLOATS * row.elements if floats_differ else 0
        said = f"{_STEPS} steps on {100 * _BEHIND_FLOATS:g} % of the values" if few else "nothing"
        yield FileLayer(
            written.path.name,
            row.path or row.node,
            _SPARSE_OPS.get(row.node.rstrip("0123456789"), row.node),
            row.form,
            row.elements,
            row.different if is_int8 else None,
            largest,
            said if is_int8 else f"{TOLERANCE:g} of the largest value",
            (row.different <= few and largest <= (_STEPS if few else 0))
            if is_int8
            else largest <= (_LOOSE if few and row.node == "output" else TOLERANCE),
        )


def _plugin(written: Written, args: tuple[Any, ...]) -> Iterator[FileLayer]:
    """Both sides compute in the plugin's arithmetic, in which no value may differ."""
    from bevquant_export.targets.autoware import compare_autoware_onnx

    for row in written.made.differences or compare_autoware_onnx(written.made, args):
        op = "output" if row.node == "output" else "sparse_conv"
        yield FileLayer(
            written.path.name, row.path or row.node, op, "float16", row.elements, row.different,
            row.largest, "nothing", row.different == 0,
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
