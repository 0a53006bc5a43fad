"""The model in integers: stages, every step, what stays float."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from bevfusion_quant.report._format import count, decibels, fixed, part_of, percent
from bevfusion_quant.report._html import Html, join, path_name, tag
from bevfusion_quant.report._section import Section, field, select
from bevfusion_quant.report._table import Column, cell, share, table_head

if TYPE_CHECKING:
    from bevfusion_quant.integer import FloatIsland, SavedPart, Simulation
    from bevfusion_quant.ptq import AgreementRow
    from bevquant_int8sim import LayerRow

__all__ = ["integers_section"]

DASH = "–"
COLUMNS = (
    Column("order", "#", "order of execution", "minor"),
    Column("layer", "Layer", "path in the model", "name", is_text=True),
    Column("kind", "Step", "what it computes", "minor", is_text=True),
    Column("form", "Output", "how the output is held", "minor", is_text=True),
    Column("fake", "Fake dB", "SQNR of the fake-quantized output against float", "minor"),
    Column("sqnr", "Integer dB", "SQNR of the integer output against float"),
    Column("most", "Max steps", "largest difference of integer and fake-quantized output, each "
           "model on its own, in steps of the output", first="descending"),
    Column("mean", "Mean steps", "mean of its size", first="descending"),
    Column("off", "Differ", "share of output values that differ", "minor", first="descending"),
    Column("forced", "Same input", "largest difference where the fake-quantized layer is given the "
           "integer model's input", first="descending"),
    Column("saturated", "Saturated", "share of output values beyond the range",
           first="descending"),
    Column("bits", "Acc. bits", "bits of the largest accumulator, sign included", "minor",
           first="descending"),
)  # fmt: skip
BY_KEY = {column.key: column for column in COLUMNS}


def integers_section(simulation: Simulation) -> Section:
    """What departs first, then stages, steps and float islands."""
    html = tag(
        "div",
        *(tag("p", line, class_="note") for line in _about(simulation)),
        tag("div", _stages(simulation), _agreement(simulation.agreement), class_="columns"),
        _controls(simulation.layers),
        tag(
            "div",
            _table(simulation.layers),
            class_="scroll",
            tabindex=0,
            role="region",
            aria_label="Steps of the integer model",
        ),
        _islands(simulation.islands),
        _saved(simulation.saved),
    )
    return Section("integers", "Integer simulation", html)


def _about(simulation: Simulation) -> Iterator[Html]:
    first, wrong = simulation.first_departure, simulation.wrong
    if first is None:
        yield join("Integer and fake-quantized results agree within one step everywhere.")
    else:
        link = tag("a", first.path, href=f"#integer-{simulation.layers.index(first)}")
        yield join(
            link,
            f" departs first: up to {first.max_steps} steps of its output from the fake-quantized "
            f"result, {percent(first.off)} of its values differ.",
        )
    if wrong:
        links = [
            tag("a", row.path, href=f"#integer-{simulation.layers.index(row)}") for row in wrong
        ]
        yield join("On the same inputs more than one step apart: ", *_commas(links), ".")
    else:
        yield join("Given the same inputs, every layer agrees within one step, or says why not.")
    seconds = ", ".join(f"{s:.2f} s" for s in simulation.frame_seconds[:5])
    more = " …" if len(simulation.frame_seconds) > 5 else ""
    yield join(f"Kernels: {simulation.backend}. In integers a frame took {seconds}{more}.")


def _commas(links: Sequence[Html]) -> Iterator[Html]:
    for index, link in enumerate(links):
        yield join(", " if index else "", link)


def _stages(simulation: Simulation) -> Html:
    heads = ("Stage", "Fake-quantized", "Integer", "Max steps", "Same input")
    rows = [
        tag(
            "tr",
            tag("th", stage.title, scope="row"),
            tag("td", decibels(stage.fake_sqnr_db)),
            tag("td", decibels(stage.integer_sqnr_db)),
            tag("td", _whole(stage.max_steps)),
            tag("td", _whole(stage.forced_max_steps)),
        )
        for stage in simulation.stages
    ]
    return _pairs("SQNR against float, last layer of each stage", heads, rows)


def _agreement(rows: Sequence[AgreementRow]) -> Html | None:
    if not rows:
        return None
    heads = ("Within", "Float", "Integer", "Matched", "Mean |Δscore|")
    lines = [
        tag(
            "tr",
            tag("th", f"{row.distance:g} m", scope="row"),
            tag("td", count(row.float_detections)),
            tag("td", count(row.quantized_detections)),
            tag("td", count(row.matched)),
            tag("td", fixed(row.score_mean, 4)),
        )
        for row in rows
    ]
    return _pairs("Detections, float against integer, same class", heads, lines)


def _pairs(title: str, heads: Sequence[str], rows: Sequence[Html]) -> Html:
    return tag(
        "table",
        tag("caption", title),
        tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads))),
        tag("tbody", *rows),
        class_="pairs classes",
    )


def _controls(layers: Sequence[LayerRow]) -> Html:
    parts = {part_of(row.path): "" for row in layers if not row.path.startswith("<")}
    search = tag("input", type="search", id="integer-search", placeholder="layer or step",
                 autocomplete="off", spellcheck="false")  # fmt: skip
    return tag(
        "div",
        field("Search", search),
        field("Part", select("integer-part", {"": "all", **{p: p for p in parts}})),
        tag("label", tag("input", type="checkbox", id="integer-low"),
            tag("span", "wrong on the same input only"), class_="switch"),
        tag("button", "Worst first", type="button", id="integer-worst"),
        tag("output", f"{len(layers)} steps", id="integer-shown"),
        class_="controls",
    )  # fmt: skip


def _table(layers: Sequence[LayerRow]) -> Html:
    most = max((row.max_steps or 0 for row in layers), default=0)
    best = max((row.integer_sqnr_db or 0 for row in layers), default=0.0)
    saturated = max((row.saturated or 0 for row in layers), default=0.0)
    rows = [_row(i, row, float(most), best, saturated) for i, row in enumerate(layers)]
    caption = "Float, fake-quantized and integer results of each step"
    return tag(
        "table",
        tag("caption", caption, class_="hidden"),
        table_head(COLUMNS),
        tag("tbody", *rows),
        id="integer-table",
        class_="layer-table",
    )


def _row(index: int, row: LayerRow, most: float, best: float, saturated: float) -> Html:
    is_wrong = (row.forced_max_steps or 0) > 1 and not row.why
    return tag(
        "tr",
        cell(BY_KEY["order"], index, index + 1),
        tag("th", path_name(row.path), scope="row", data_value=row.path, class_="name"),
        cell(BY_KEY["kind"], row.op, row.op),
        cell(BY_KEY["form"], row.form, row.form),
        cell(BY_KEY["fake"], row.fake_sqnr_db, fixed(row.fake_sqnr_db, 1)),
        cell(BY_KEY["sqnr"], row.integer_sqnr_db, fixed(row.integer_sqnr_db, 1),
             share(row.integer_sqnr_db, best)),
        cell(BY_KEY["most"], row.max_steps, _whole(row.max_steps), share(row.max_steps, most)),
        cell(BY_KEY["mean"], row.mean_steps, fixed(row.mean_steps, 4)),
        cell(BY_KEY["off"], row.off, percent(row.off)),
        cell(BY_KEY["forced"], row.forced_max_steps, _whole(row.forced_max_steps),
             title=row.why or None),
        cell(BY_KEY["saturated"], row.saturated, percent(row.saturated),
             share(row.saturated, saturated)),
        cell(BY_KEY["bits"], row.peak_bits, _whole(row.peak_bits)),
        id=f"integer-{index}",
        class_="low" if is_wrong else None,
        data_part=part_of(row.path),
        data_text=f"{row.path} {row.op} {row.form}".lower(),
    )  # fmt: skip


def _whole(value: int | None) -> str:
    return DASH if value is None else str(value)


def _islands(islands: Sequence[FloatIsland]) -> Html:
    """One line for all neighbours of one reason."""
    items = []
    for reason, group in groupby(islands, key=lambda island: island.reason):
        members = list(group)
        names = ", ".join(dict.fromkeys(f"{i.path} ({i.what})" for i in members))
        items.append(tag("li", tag("code", names), tag("p", reason)))
    return _list("islands", "Computed in float", len(islands), items)


def _saved(saved: Sequence[SavedPart]) -> Html:
    items = [
        tag("li", tag("code", part.part), tag("p", part.folder or f"not saved: {part.reason}"))
        for part in saved
    ]
    return _list("saved", "Saved integer models", sum(bool(part.folder) for part in saved), items)


def _list(name: str, title: str, number: int, items: Sequence[Html]) -> Html:
    summary = tag("summary", tag("span", title), tag("span", str(number), class_="count"))
    body = tag("ul", *items) if items else tag("p", "None.", class_="note")
    return tag("details", summary, body, id=f"list-{name}", class_="decision")
