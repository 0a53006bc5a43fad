"""What each layer's rounding costs, as a chart of bars, and the plan made from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bevfusion_quant.report._format import fixed, number, percent
from bevfusion_quant.report._html import Html, path_name, tag
from bevfusion_quant.report._section import Section
from bevfusion_quant.results import headline, plan_line

if TYPE_CHECKING:
    from bevfusion_quant.results import SensitivityOutcome
    from bevquant_qnn import SensitivityRow

__all__ = ["sensitivity_section"]

HOW_TO_READ = (
    "Each line is a group of layers that share a quantizer and so have one precision, the largest "
    "loss first. Alone: the score of the float model with this group alone quantized; the bar is "
    "what it loses, as a power of noise where scores are decibels, the longest the largest. Gain "
    "in float: what the quantized model wins where this group alone stays float. A plan's time is "
    "an estimate: operations times bits; its score was measured on these frames where it says so, "
    "else it is estimated from the losses added up."
)
WIDE, HIGH, GAP = 100.0, 7.0, 2.0  # of a bar, in its own units


def sensitivity_section(outcome: SensitivityOutcome) -> Section:
    """Headline, bars, the plan."""
    planned, both = outcome.plan is not None, outcome.table.quantized_score is not None
    heads = ["Layers", "Loss", *(f"{name} alone" for name in outcome.precisions)]
    kinds = [None, "bars", *(None for _ in outcome.precisions)]
    heads += [*["Gain in float"] * both, "Operations", *["Plan"] * planned]
    kinds += [*["minor"] * both, "minor", *[None] * planned]
    head = [
        tag("th", text, scope="col", class_=kind) for text, kind in zip(heads, kinds, strict=True)
    ]
    rows = outcome.table.worst_first(outcome.precisions[0])
    table = tag(
        "table",
        tag("caption", "Loss of each group of layers", class_="hidden"),
        tag("thead", tag("tr", *head)),
        tag("tbody", *(_row(outcome, row) for row in rows)),
        id="sensitivity-bars",
        class_="layer-table dense",
    )
    html = tag(
        "div",
        tag("p", tag("strong", headline(outcome))),
        tag("p", tag("strong", plan_line(outcome))) if planned else None,
        tag("p", outcome.refusal, class_="low") if outcome.refusal else None,
        tag("ul", *_legend(outcome), class_="legend") if len(outcome.precisions) > 1 else None,
        tag("div", table, class_="scroll", tabindex=0, role="region",
            aria_label="Loss of each group of layers"),
        tag("p", HOW_TO_READ, class_="note about"),
        class_="sensitivity",
    )  # fmt: skip
    return Section("sensitivity", "Sensitivity", html)


def _legend(outcome: SensitivityOutcome) -> Iterator[Html]:
    for name in outcome.precisions:
        yield tag("li", tag("span", class_=f"swatch {name}"), name)


def _row(outcome: SensitivityOutcome, row: SensitivityRow) -> Html:
    others = row.modules[1:]
    more = [tag("small", "and ", path_name(path), class_="note") for path in others]
    chosen = outcome.chosen(row)
    return tag(
        "tr",
        tag("th", path_name(row.name), *more, scope="row"),
        tag("td", _bars(outcome, row), class_="bars"),
        *(tag("td", _score(outcome, row.alone[name])) for name in outcome.precisions),
        _gain(outcome, row),
        tag("td", percent(row.operations / max(1, outcome.operations)), class_="minor"),
        tag("td", tag("span", chosen, class_=f"precision {chosen}")) if chosen else None,
    )


def _bars(outcome: SensitivityOutcome, row: SensitivityRow) -> Html:
    """One bar for each precision, as long as its loss beside the largest of all."""
    losses = {name: outcome.table.loss(row, name) for name in outcome.precisions}
    largest = max(
        (outcome.table.loss(other, name) for other in outcome.table for name in losses), default=0.0
    )
    told = ", ".join(f"{name} {percent(outcome.share(row, name))}" for name in losses)
    bars = (
        tag("rect", x="0", y=f"{index * (HIGH + GAP):g}", height=f"{HIGH:g}", class_=name,
            width=f"{WIDE * loss / largest if largest else 0.0:.2f}")
        for index, (name, loss) in enumerate(losses.items())
    )  # fmt: skip
    high = len(losses) * (HIGH + GAP) - GAP
    return tag(
        "svg",
        *bars,
        viewBox=f"0 0 {WIDE:g} {high:g}",
        preserveAspectRatio="none",
        height=f"{high:g}",
        role="img",
        aria_label=f"Share of loss: {told}",
    )


def _score(outcome: SensitivityOutcome, value: float) -> str:
    digits = {"sqnr": 1, "mAP": 2}.get(outcome.table.metric)
    shown = number(value, 3) if digits is None else fixed(value, digits)
    return f"{shown} {outcome.unit}"


def _gain(outcome: SensitivityOutcome, row: SensitivityRow) -> Html | None:
    """No cell where that half was left out."""
    gain = outcome.gain(row)
    return None if gain is None else tag("td", f"{gain:+.2g} {outcome.unit}", class_="minor")
