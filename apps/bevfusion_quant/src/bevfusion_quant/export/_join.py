"""Rows of the files beside the rows of the same layers in the other executions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bevfusion_quant.results import BpuLayer, ExportedFile
    from bevquant_int8sim import LayerRow

__all__ = ["beside_bpu_layers", "beside_layers"]

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
