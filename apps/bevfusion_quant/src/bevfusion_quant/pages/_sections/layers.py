"""The layer table and the chart above it."""

from __future__ import annotations

from collections.abc import Mapping

from bev_data.tables import CellParts, Column, Row, Table, finite, number_cell, percent, share
from bevfusion_quant.pages._content import ReportContent
from bevfusion_quant.pages._format import decibels, matched_note, part_of, rounded
from bevfusion_quant.pages._page import Section
from bevquant_qnn import LayerRow

ORDER = 40
COLUMNS = (
    Column("#", "minor", "order", "order of execution"),
    Column("Layer", "name", "layer", "path in the model", is_text=True),
    Column("Kind", "minor", "kind", "class of the module", is_text=True),
    Column("Channels", "minor", "channels", "channels of the output", "descending"),
    Column("Rows", "minor", "rows", "active voxels or cells in a frame, mean", "descending"),
    Column("SQNR dB", "", "sqnr", "signal to quantization noise of the output"),
    Column("Cosine", "", "cosine", "cosine of float and quantized output"),
    Column("Saturated", "", "saturated", "share of input values beyond the range", "descending"),
    Column("Input range", "minor", "amax", "largest magnitude the input's quantizer can express",
           "descending"),
)  # fmt: skip


def section(content: ReportContent) -> Section | None:
    """Chart in the order of execution, then the table."""
    layers, low = content.layers, content.low_sqnr_db
    if not layers:
        return None
    cards = {path: i for i, v in enumerate(content.quantizers) for path in v.paths}
    # What fills a bar: the best SQNR, the largest 1 − cosine, the largest saturated share.
    best = max((finite(row.sqnr_db) or 0.0 for row in layers), default=0.0)
    error = max((1 - c for row in layers if (c := finite(row.cosine)) is not None), default=0.0)
    beyond = max((finite(row.saturated) or 0.0 for row in layers), default=0.0)
    rows = [_row(i, row, low, (best, error, beyond), cards) for i, row in enumerate(layers)]
    data = {
        "low": low,
        "parts": list(dict.fromkeys(part_of(row.layer) for row in layers)),
        "table": Table(
            "Float against quantized, output of each layer", COLUMNS, rows, "sorted",
            "layer-table", "",
        ),
    }  # fmt: skip
    drawn = [
        [row.layer, part_of(row.layer), None if level is None else rounded(level)]
        for row, level in ((row, finite(row.sqnr_db)) for row in layers)
    ]
    return Section("layers", "Layers", data, {"low": low, "layers": drawn})


def _row(
    index: int,
    row: LayerRow,
    low: float,
    full: tuple[float, float, float],
    cards: Mapping[str, int],
) -> Row:
    is_low = row.sqnr_db is not None and row.sqnr_db < low
    error = None if row.cosine is None else 1 - row.cosine
    sqnr = number_cell(row.sqnr_db, ".1f") | CellParts(bar=share(row.sqnr_db, full[0]))
    if is_low:
        sqnr["title"] = f"{decibels(row.sqnr_db)}, below {low:g} dB"
    amax = number_cell(row.input_amax, ".4g")
    card = cards.get(f"{row.layer}._input_quantizer")
    if card is not None and row.input_amax is not None:
        amax |= CellParts(href=f"quantizer-{card}", title="its histogram")
    name = CellParts(path=row.layer, value=row.layer)
    broken = f"{row.not_finite:,} values are infinite or NaN" if row.not_finite else ""
    if notes := [note for note in (broken, matched_note(row.matched)) if note]:
        name["note"] = "; ".join(notes)
    cells = (
        CellParts(text=str(index + 1), value=index),
        name,
        CellParts(text=row.kind, value=row.kind),
        number_cell(row.channels, ",.0f"),
        number_cell(row.rows, ",.0f"),
        sqnr,
        number_cell(row.cosine, ".5f") | CellParts(bar=share(error, full[1])),
        CellParts(text=percent(row.saturated), value=finite(row.saturated),
                  bar=share(row.saturated, full[2])),
        amax,
    )  # fmt: skip
    return Row(cells, f"layer-{index}", "low" if is_low else "", part_of(row.layer),
               f"{row.layer} {row.kind}".lower())  # fmt: skip
