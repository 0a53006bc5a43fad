"""The layer table and the chart above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from bevfusion_quant.report._encode import rounded
from bevfusion_quant.report._format import count, decibels, finite, fixed, number, part_of, percent
from bevfusion_quant.report._html import Html, path_name, tag
from bevfusion_quant.report._section import Section, field, select
from bevfusion_quant.report._table import Column, cell, share, table_head

if TYPE_CHECKING:
    from bevfusion_quant.measure import LayerRow

__all__ = ["finite_rows", "layers_section"]


class _Scales(NamedTuple):
    """What fills a bar: the best SQNR, the largest 1 − cosine, the largest saturated share."""

    sqnr: float
    error: float
    saturated: float

    @classmethod
    def of(cls, rows: Sequence[LayerRow]) -> _Scales:
        return cls(
            max((row.sqnr_db for row in rows if row.sqnr_db is not None), default=0.0),
            max((1 - row.cosine for row in rows if row.cosine is not None), default=0.0),
            max((row.saturated for row in rows if row.saturated is not None), default=0.0),
        )


COLUMNS = (
    Column("order", "#", "order of execution", "minor"),
    Column("layer", "Layer", "path in the model", "name", is_text=True),
    Column("kind", "Kind", "class of the module", "minor", is_text=True),
    Column("channels", "Channels", "channels of the output", "minor", first="descending"),
    Column("rows", "Rows", "active voxels or cells in a frame, mean", "minor", first="descending"),
    Column("sqnr", "SQNR dB", "signal to quantization noise of the output"),
    Column("cosine", "Cosine", "cosine of float and quantized output"),
    Column("saturated", "Saturated", "share of input values beyond the range", first="descending"),
    Column(
        "amax",
        "Input range",
        "largest magnitude the input's quantizer can express",
        "minor",
        first="descending",
    ),
)  # fmt: skip
BY_KEY = {column.key: column for column in COLUMNS}


def finite_rows(layers: Sequence[LayerRow]) -> list[LayerRow]:
    """Rows whose NaN and infinities are None: neither can be sorted or drawn."""
    return [
        replace(
            row,
            sqnr_db=finite(row.sqnr_db),
            cosine=finite(row.cosine),
            saturated=finite(row.saturated),
            input_amax=finite(row.input_amax),
        )
        for row in layers
    ]


def layers_section(
    layers: Sequence[LayerRow], low_sqnr_db: float, quantizer_of: Mapping[str, int]
) -> Section:
    """Chart in the order of execution, then the table.

    Args:
        layers: In the order of execution.
        low_sqnr_db: Layers below are marked.
        quantizer_of: Number of the quantizer's card by path.
    """
    parts = {part_of(row.layer): "" for row in layers}
    controls = tag(
        "div",
        field("Search", tag("input", type="search", id="layer-search", placeholder="layer or kind",
                            autocomplete="off", spellcheck="false")),
        field("Part", select("layer-part", {"": "all", **{p: p for p in parts}})),
        tag("label", tag("input", type="checkbox", id="layer-low"),
            tag("span", f"below {low_sqnr_db:g} dB only"), class_="switch"),
        tag("button", "Worst first", type="button", id="layer-worst"),
        tag("output", f"{len(layers)} layers", id="layer-shown"),
        class_="controls",
    )  # fmt: skip
    scales = _Scales.of(layers)
    rows = [_row(i, row, low_sqnr_db, scales, quantizer_of) for i, row in enumerate(layers)]
    table = tag(
        "table",
        tag("caption", "Float against quantized, output of each layer", class_="hidden"),
        table_head(COLUMNS),
        tag("tbody", *rows),
        id="layer-table",
        class_="layer-table",
    )
    chart = tag(
        "figure",
        tag("div", id="layer-chart", class_="chart"),
        tag("figcaption", "SQNR of every layer's output in the order of execution. Point at a dot, "
            "or focus the chart and use the arrow keys; Enter goes to the row. "
            f"Dashed: {low_sqnr_db:g} dB.", class_="note"),
    )  # fmt: skip
    scroll = tag("div", table, class_="scroll", tabindex=0, role="region", aria_label="Layer table")
    data = {
        "low": low_sqnr_db,
        "layers": [
            [row.layer, part_of(row.layer), None if row.sqnr_db is None else rounded(row.sqnr_db)]
            for row in layers
        ],
    }
    return Section("layers", "Layers", tag("div", chart, controls, scroll), data)


def _row(
    index: int, row: LayerRow, low: float, scales: _Scales, quantizer_of: Mapping[str, int]
) -> Html:
    is_low = row.sqnr_db is not None and row.sqnr_db < low
    error = None if row.cosine is None else 1 - row.cosine
    card = quantizer_of.get(f"{row.layer}._input_quantizer")
    amax: Html | str = number(row.input_amax)
    if card is not None and row.input_amax is not None:
        amax = tag("a", amax, href=f"#quantizer-{card}", title="its histogram")
    return tag(
        "tr",
        cell(BY_KEY["order"], index, index + 1),
        tag("th", path_name(row.layer), scope="row", data_value=row.layer, class_="name"),
        cell(BY_KEY["kind"], row.kind, row.kind),
        cell(BY_KEY["channels"], row.channels, count(row.channels)),
        cell(BY_KEY["rows"], row.rows, count(row.rows)),
        cell(BY_KEY["sqnr"], row.sqnr_db, fixed(row.sqnr_db, 1), share(row.sqnr_db, scales.sqnr),
              f"{decibels(row.sqnr_db)}, below {low:g} dB" if is_low else None),
        cell(BY_KEY["cosine"], row.cosine, fixed(row.cosine, 5), share(error, scales.error)),
        cell(BY_KEY["saturated"], row.saturated, percent(row.saturated),
              share(row.saturated, scales.saturated)),
        cell(BY_KEY["amax"], row.input_amax, amax),
        id=f"layer-{index}",
        class_="low" if is_low else None,
        data_part=part_of(row.layer),
        data_text=f"{row.layer} {row.kind}".lower(),
    )  # fmt: skip
