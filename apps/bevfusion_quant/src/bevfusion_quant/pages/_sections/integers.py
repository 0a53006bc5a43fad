"""The integer model: first difference, stages, every step, float steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from bev_data.tables import CellParts, Column, Row, Table, finite, number_cell, percent, share
from bevfusion.quantization import QUERIES, FloatPart, integer_box_table, integer_stage_table
from bevfusion_quant.pages._content import ReportContent
from bevfusion_quant.pages._format import matched_note, part_of
from bevfusion_quant.pages._page import Section
from bevquant_int8sim import LayerRow

ORDER = 50
COLUMNS = (
    Column("#", "minor", "order", "order of execution"),
    Column("Layer", "name", "layer", "path in the model", is_text=True),
    Column("Operation", "minor", "kind", "what it computes", is_text=True),
    Column("Output", "minor", "form", "how the output is held", is_text=True),
    Column("Fake dB", "minor", "fake", "SQNR of the fake-quantized output against float"),
    Column("Integer dB", "", "sqnr", "SQNR of the integer output against float"),
    Column("Fake cosine", "minor", "near", "cosine of fake-quantized and float output"),
    Column("Integer cosine", "minor", "cosine", "cosine of integer and float output"),
    Column("Max steps", "", "most", "largest difference of integer and fake-quantized output, each "
           "model on its own, in steps of the output", "descending"),
    Column("Mean steps", "minor", "mean", "mean of its size", "descending"),
    Column("Differ", "minor", "off", "share of output values that differ", "descending"),
    Column("Same input", "", "forced", "largest difference where the fake-quantized layer is given "
           "the integer model's input", "descending"),
    Column("Saturated", "minor", "saturated", "share of output values beyond the range",
           "descending"),
    Column("Acc. bits", "minor", "bits", "bits of the largest accumulator, sign included",
           "descending"),
)  # fmt: skip


def section(content: ReportContent) -> Section | None:
    """First difference, then stages, steps and float fallbacks."""
    simulation = content.integers
    if simulation is None:
        return None
    layers = simulation.layers
    first, shown = simulation.first_departure, [row for row in layers if _tells(row)]
    parts = [part_of(row.path) for row in shown if not row.path.startswith("<")]
    data = {
        "first": None if first is None else _departure(layers, first),
        "wrong": [_departure(layers, row) for row in simulation.wrong],
        "explained": [_departure(layers, row) for row in simulation.explained],
        "backend": simulation.backend,
        "seconds": simulation.frame_seconds,
        "compared_on": simulation.compared_on,
        "own_steps": any(row.path.startswith("<") for row in layers),
        "queries": QUERIES
        * any(r.path.startswith("heads.object.prediction_heads") for r in layers),
        "stages": integer_stage_table(simulation),
        "agreement": integer_box_table(simulation) if simulation.agreement else None,
        "parts": list(dict.fromkeys(parts)),
        "table": _table(layers),
        "islands": list(_float_parts(simulation.islands)),
        "island_count": len(simulation.islands),
        "saved": simulation.saved,
    }
    return Section("integers", "Integer simulation", data)


def _departure(layers: Sequence[LayerRow], row: LayerRow) -> dict[str, Any]:
    return {
        "path": row.path,
        "index": layers.index(row),
        "steps": row.max_steps,
        "differ": row.off,
        "forced": row.forced_max_steps,
        "why": row.why,
    }


def _table(layers: Sequence[LayerRow]) -> Table:
    """A row per step in the order of execution, except float steps with equal results."""
    most = max((row.max_steps or 0 for row in layers), default=0)
    best = max((finite(row.integer_sqnr_db) or 0 for row in layers), default=0.0)
    rows = [_row(i, row, float(most), best) for i, row in enumerate(layers) if _tells(row)]
    title = "Float, fake-quantized and integer results of each operation"
    return Table(title, COLUMNS, rows, "sorted", "integer-table", "dense")


def _row(index: int, row: LayerRow, most: float, best: float) -> Row:
    name = CellParts(path=row.path, value=row.path)
    broken = "infinite or NaN values, float has none" if any(row.not_finite) else ""
    if notes := [note for note in (row.why, matched_note(row.matched), broken) if note]:
        name["note"] = "; ".join(notes)
    db, steps = row.integer_sqnr_db, row.max_steps
    cells = (
        CellParts(text=str(index + 1), value=index),
        name,
        CellParts(text=row.op, value=row.op),
        CellParts(text=row.form, value=row.form),
        number_cell(row.fake_sqnr_db, ".1f"),
        number_cell(db, ".1f") | CellParts(bar=share(db, best)),
        number_cell(row.fake_cosine, ".5f"),
        number_cell(row.integer_cosine, ".5f"),
        number_cell(steps, ".0f") | CellParts(bar=share(steps, most)),
        number_cell(row.mean_steps, ".4f"),
        CellParts(text=percent(row.off), value=row.off),
        number_cell(row.forced_max_steps, ".0f"),
        CellParts(text=percent(row.saturated), value=row.saturated),
        number_cell(row.peak_bits, ".0f"),
    )
    kind = "low" if broken or (row.forced_max_steps or 0) > 1 else ""
    search = f"{row.path} {row.op} {row.form}".lower()
    return Row(cells, f"integer-{index}", kind, part_of(row.path), search)


def _tells(row: LayerRow) -> bool:
    """Whether a step can differ: float steps upstream of all quantized layers are equal."""
    figures = (row.max_steps, row.peak_bits, row.fake_sqnr_db, row.integer_sqnr_db)
    return any(figure is not None for figure in figures)


def _float_parts(islands: Sequence[FloatPart]) -> Iterator[dict[str, Any]]:
    """Each reason with the parts that it applies to."""
    for reason, found in groupby(islands, key=lambda fallback: fallback.reason):
        group = list(found)
        members: dict[str, list[str]] = {}
        for fallback in group:
            members.setdefault(fallback.path, []).append(fallback.what)
        counted = [fallback.share for fallback in group if fallback.share is not None]
        much = f" ({100 * sum(counted):.2g} % of the arithmetic)" if counted else ""
        yield {"reason": f"{reason}{much}", "members": list(members.items())}
