"""The model in integers: what departs first, stages, every step, what stays float."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from bevfusion_quant.integer import QUERIES
from bevfusion_quant.report._format import count, fixed, percent
from bevfusion_quant.report._html import Html, join, path_name, tag
from bevfusion_quant.report._integer_table import integer_controls, integer_table
from bevfusion_quant.report._section import Section

if TYPE_CHECKING:
    from bevfusion_quant.integer import FloatIsland, IntegerStage, SavedPart, Simulation
    from bevfusion_quant.measure import AgreementRow
    from bevquant_int8sim import LayerRow

__all__ = ["integers_section"]

DASH = "–"
HOW_TO_READ = (
    "Three executions on the same frames: float, fake-quantized, and integers as an INT8 chip "
    "computes them. Outputs are compared as the layer behind reads them, so quantized; a step is "
    "one integer of the output. Max, mean and differ: every model on its own activations, where "
    "a single step early on grows from layer to layer. Same input: the fake-quantized layer is "
    "given the integer model's input, which leaves the layer's own rounding, 0 or 1 step. A dash: "
    "the output is float, or a 32-bit sum that the addition behind it reads. Float steps that are "
    "equal in all three are left out."
)


def integers_section(simulation: Simulation) -> Section:
    """What departs first, then stages, steps and float islands."""
    html = tag(
        "div",
        *(tag("p", line) for line in _verdict(simulation)),
        tag("p", *_how_to_read(simulation.layers), class_="note about"),
        tag("div", _stages(simulation.stages), _agreement(simulation.agreement), class_="columns"),
        integer_controls(simulation.layers),
        tag(
            "div",
            integer_table(simulation.layers),
            class_="scroll",
            tabindex=0,
            role="region",
            aria_label="Steps of the integer model",
        ),
        _islands(simulation.islands),
        _saved(simulation.saved),
    )
    return Section("integers", "Integer simulation", html)


def _verdict(simulation: Simulation) -> Iterator[Html]:
    layers, first = simulation.layers, simulation.first_departure
    if first is None:
        yield join("Integer and fake-quantized results agree within one step everywhere.")
    else:
        yield join(
            _link(layers, first),
            f" departs first: up to {_steps(first.max_steps)} of its output from the "
            f"fake-quantized result, {percent(first.off)} of its values differ; on the same input "
            f"{_up_to(first.forced_max_steps)}.",
        )
    if simulation.wrong:
        links = [_link(layers, row) for row in simulation.wrong]
        yield join(tag("strong", "Wrong on the same input: ", class_="low"), *_commas(links), ".")
    for row in simulation.explained:
        steps = _steps(row.forced_max_steps)
        yield join("On the same input ", _link(layers, row), f" is {steps} off: {row.why}.")
    if not simulation.wrong and not simulation.explained:
        yield join("On the same input every layer agrees within one step.")
    times = simulation.frame_seconds
    seconds = ", ".join(f"{s:.2f} s" for s in times[:5]) + " …" * (len(times) > 5)
    frames = "The frame" if len(times) == 1 else "The frames"
    yield join(
        "Computed by the kernels ", tag("strong", simulation.backend),
        f". {frames} took {seconds} in integers, warming up included.",
    )  # fmt: skip


def _link(layers: Sequence[LayerRow], row: LayerRow) -> Html:
    return tag("a", path_name(row.path), href=f"#integer-{layers.index(row)}", class_="path")


def _up_to(number: int | None) -> str:
    return f"up to {_steps(number)}" if number else "none"


def _steps(number: int | None) -> str:
    return f"{number or 0} step{'s' * (number != 1)}"


def _commas(links: Sequence[Html]) -> Iterator[Html]:
    for index, link in enumerate(links):
        yield join(", " if index else "", link)


def _how_to_read(layers: Sequence[LayerRow]) -> Iterator[str]:
    yield HOW_TO_READ
    if any(row.path.startswith("<") for row in layers):
        yield " In angle brackets: a step of the model's own forward, not of a module's."
    if any(row.path.startswith("heads.object.prediction_heads") for row in layers):
        yield f" {QUERIES}"


def _stages(stages: Sequence[IntegerStage]) -> Html:
    heads = ("Last step of the stage", "Fake dB", "Integer dB", "Max steps", "Same input")
    rows = [
        tag(
            "tr",
            tag("th", stage.title, tag("span", path_name(stage.layer), class_="note path"),
                scope="row"),
            tag("td", fixed(stage.fake_sqnr_db, 1)),
            tag("td", fixed(stage.integer_sqnr_db, 1)),
            tag("td", _whole(stage.max_steps)),
            tag("td", _whole(stage.forced_max_steps)),
        )
        for stage in stages
    ]  # fmt: skip
    return _pairs("SQNR against float; largest differences in the stage", heads, rows)


def _agreement(rows: Sequence[AgreementRow]) -> Html | None:
    if not rows:
        return None
    heads = ("Within", "Float", "Integer", "Matched", "Mean |\u2060Δscore|")
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


def _whole(value: int | None) -> str:
    return DASH if value is None else str(value)


def _islands(islands: Sequence[FloatIsland]) -> Html:
    """A reason, then everything that it holds for."""
    items = []
    for reason, found in groupby(islands, key=lambda island: island.reason):
        group = list(found)
        members: dict[str, list[str]] = {}
        for island in group:
            members.setdefault(island.path, []).append(island.what)
        paths = (
            tag("code", path_name(path or "model"), tag("span", f" {', '.join(what)}",
                class_="stem"))
            for path, what in members.items()
        )  # fmt: skip
        counted = [island.share for island in group if island.share is not None]
        much = f" ({100 * sum(counted):.2g} % of the operations)" if counted else ""
        items.append(tag("li", tag("p", f"{reason}{much}"), *paths))
    return _list("islands", "Computed in float", len(islands), items)


def _saved(saved: Sequence[SavedPart]) -> Html:
    items = [
        tag("li", tag("code", path_name(part.part) if part.part != "model" else "whole model"),
            tag("p", part.folder or f"not saved: {part.reason}"))
        for part in saved
    ]  # fmt: skip
    return _list("saved", "Saved integer models", sum(bool(part.folder) for part in saved), items)


def _list(name: str, title: str, number: int, items: Sequence[Html]) -> Html:
    summary = tag("summary", tag("span", title), tag("span", str(number), class_="count"))
    body = tag("ul", *items) if items else tag("p", "None.", class_="note")
    return tag("details", summary, body, id=f"list-{name}", class_="decision")
