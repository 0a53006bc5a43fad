"""The table of every step of the integer model, and what filters it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bevfusion_quant.report._format import finite, fixed, part_of, percent
from bevfusion_quant.report._html import Html, path_name, tag
from bevfusion_quant.report._section import field, select
from bevfusion_quant.report._table import Column, cell, share, table_head

if TYPE_CHECKING:
    from bevquant_int8sim import LayerRow

__all__ = ["integer_controls", "integer_table"]

COLUMNS = (
    Column("order", "#", "order of execution", "minor"),
    Column("layer", "Layer", "path in the model", "name", is_text=True),
    Column("kind", "Step", "what it computes", "minor", is_text=True),
    Column("form", "Output", "how the output is held", "minor", is_text=True),
    Column("fake", "Fake dB", "SQNR of the fake-quantized output against float", "minor"),
    Column("sqnr", "Integer dB", "SQNR of the integer output against float"),
    Column("near", "Fake cosine", "cosine of fake-quantized and float output", "minor"),
    Column("cosine", "Integer cosine", "cosine of integer and float output", "minor"),
    Column("most", "Max steps", "largest difference of integer and fake-quantized output, each "
           "model on its own, in steps of the output", first="descending"),
    Column("mean", "Mean steps", "mean of its size", "minor", first="descending"),
    Column("off", "Differ", "share of output values that differ", "minor", first="descending"),
    Column("forced", "Same input", "largest difference where the fake-quantized layer is given the "
           "integer model's input", first="descending"),
    Column("saturated", "Saturated", "share of output values beyond the range", "minor",
           first="descending"),
    Column("bits", "Acc. bits", "bits of the largest accumulator, sign included", "minor",
           first="descending"),
)  # fmt: skip
BY_KEY = {column.key: column for column in COLUMNS}


def integer_controls(layers: Sequence[LayerRow]) -> Html:
    """Search, part of the model, what is wrong alone."""
    named = [row.path for row in layers if _tells(row) and not row.path.startswith("<")]
    parts = {part_of(path): "" for path in named}
    search = tag("input", type="search", id="integer-search", placeholder="layer, step or int8",
                 autocomplete="off", spellcheck="false")  # fmt: skip
    return tag(
        "div",
        field("Search", search),
        field("Part", select("integer-part", {"": "all", **{p: p for p in parts}})),
        tag("label", tag("input", type="checkbox", id="integer-low"),
            tag("span", "over one step on the same input"), class_="switch"),
        tag("button", "Worst first", type="button", id="integer-worst"),
        tag("output", f"{sum(map(_tells, layers))} steps", id="integer-shown"),
        class_="controls",
    )  # fmt: skip


def integer_table(layers: Sequence[LayerRow]) -> Html:
    """A row for each step that is no float step with equal results, in the order of execution."""
    most = max((row.max_steps or 0 for row in layers), default=0)
    best = max((finite(row.integer_sqnr_db) or 0 for row in layers), default=0.0)
    rows = [_row(i, row, float(most), best) for i, row in enumerate(layers) if _tells(row)]
    caption = "Float, fake-quantized and integer results of each step"
    return tag(
        "table",
        tag("caption", caption, class_="hidden"),
        table_head(COLUMNS),
        tag("tbody", *rows),
        id="integer-table",
        class_="layer-table dense",
    )


def _row(index: int, row: LayerRow, most: float, best: float) -> Html:
    is_off = (row.forced_max_steps or 0) > 1
    why = tag("small", row.why, class_="note") if row.why else None
    return tag(
        "tr",
        cell(BY_KEY["order"], index, index + 1),
        tag("th", path_name(row.path), why, scope="row", data_value=row.path, class_="name"),
        cell(BY_KEY["kind"], row.op, row.op),
        cell(BY_KEY["form"], row.form, row.form),
        cell(BY_KEY["fake"], row.fake_sqnr_db, fixed(row.fake_sqnr_db, 1)),
        cell(BY_KEY["sqnr"], row.integer_sqnr_db, fixed(row.integer_sqnr_db, 1),
             share(row.integer_sqnr_db, best)),
        cell(BY_KEY["near"], row.fake_cosine, fixed(row.fake_cosine, 5)),
        cell(BY_KEY["cosine"], row.integer_cosine, fixed(row.integer_cosine, 5)),
        cell(BY_KEY["most"], row.max_steps, _whole(row.max_steps), share(row.max_steps, most)),
        cell(BY_KEY["mean"], row.mean_steps, fixed(row.mean_steps, 4)),
        cell(BY_KEY["off"], row.off, percent(row.off)),
        cell(BY_KEY["forced"], row.forced_max_steps, _whole(row.forced_max_steps)),
        cell(BY_KEY["saturated"], row.saturated, percent(row.saturated)),
        cell(BY_KEY["bits"], row.peak_bits, _whole(row.peak_bits)),
        id=f"integer-{index}",
        class_="low" if is_off else None,
        data_part=part_of(row.path),
        data_text=f"{row.path} {row.op} {row.form}".lower(),
    )  # fmt: skip


def _tells(row: LayerRow) -> bool:
    """Float steps before anything quantized give the same in all three executions."""
    figures = (row.max_steps, row.peak_bits, row.fake_sqnr_db, row.integer_sqnr_db)
    return any(figure is not None for figure in figures)


def _whole(value: int | None) -> str:
    return "–" if value is None else str(value)
