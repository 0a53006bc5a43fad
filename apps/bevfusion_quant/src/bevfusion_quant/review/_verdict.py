"""The first section: the headline table, then every question with its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bev_data.metrics import points, span
from bevfusion_quant.report import Section
from bevfusion_quant.report._format import count, fixed
from bevfusion_quant.report._html import Html, join, tag
from bevfusion_quant.review._evidence import frames_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bev_data.metrics import Interval
    from bevfusion_quant.review._checks import Check
    from bevfusion_quant.review._headline import HeadlineGroup, HeadlineRow

__all__ = ["verdict_section"]

MARKS = {"good": "✓ fine", "look": "▲ look closer", "missing": "– missing"}
DASH = "–"
HEADS = {"Model": None, "mAP, of 100": None, "less float": None, "NDS": "minor", "SQNR, dB": None}
HOW_TO_READ = (
    "mAP: nuScenes' mean average precision on labelled frames, in points of 100, with the "
    "bootstrap's interval below it. Less float: the difference on the same frames, paired, from "
    "the first line of its group. SQNR: against float, at the end of the last quantized stage. "
    "Groups on other frames do not compare with one another."
)


def verdict_section(groups: Sequence[HeadlineGroup], checks: Sequence[Check]) -> Section:
    """Headline table and questions."""
    nothing = tag("p", "No model was compared with float.", class_="low")
    html = tag(
        "div",
        _headline(groups) if groups else nothing,
        tag("p", HOW_TO_READ, *_without(groups), class_="note about") if groups else None,
        tag("h3", "Questions, and what the runs answer", class_="sub"),
        _questions(checks),
        class_="verdict",
    )  # fmt: skip
    return Section("verdict", "Verdict", html)


def _headline(groups: Sequence[HeadlineGroup]) -> Html:
    heads = [tag("th", text, scope="col", class_=kind) for text, kind in HEADS.items()]
    head = tag("thead", tag("tr", *heads))
    table = tag(
        "table",
        tag("caption", "Every model beside float", class_="hidden"),
        head,
        *map(_group, groups),
        id="headline",
        class_="pairs classes",
    )
    return tag(
        "div", table, class_="wide-table", tabindex=0, role="region", aria_label="Headline table"
    )


def _group(group: HeadlineGroup) -> Html:
    labels = "no labels" if group.labels is None else f"{count(group.labels)} labels"
    about = join(
        frames_text(group.frames), f", {labels}", f", SQNR at: {group.stage}" * bool(group.stage),
        ", from ", tag("code", group.source),
    )  # fmt: skip
    title = tag("tr", tag("th", about, scope="rowgroup", colspan=len(HEADS), class_="group"))
    return tag("tbody", title, *map(_row, group.rows))


def _row(row: HeadlineRow) -> Html:
    apart = DASH if row.difference is None else f"{100 * row.difference:+.2f}"
    return tag(
        "tr",
        tag("th", row.model, scope="row"),
        tag("td", _with_interval(points(row.mean_ap), row.interval)),
        tag("td", _with_interval(apart, row.difference_interval, signed=True)),
        tag("td", points(row.nds), class_="minor"),
        tag("td", fixed(row.sqnr_db, 1)),
    )


def _with_interval(value: str, interval: Interval | None, *, signed: bool = False) -> Html:
    told = None if interval is None else tag("small", span(interval, signed=signed))
    return tag("span", value, told, class_="with-interval")


def _without(groups: Sequence[HeadlineGroup]) -> Iterator[str]:
    missing = list(dict.fromkeys(name for group in groups for name in group.missing))
    if missing:
        yield f" NDS is without {' and '.join(missing)}, so not comparable with nuScenes' tables."


def _questions(checks: Sequence[Check]) -> Html:
    head = tag("thead", tag("tr", *(tag("th", text, scope="col") for text in (
        "Question", "Answer", "Finding", "Seen"))))  # fmt: skip
    rows = [
        tag(
            "tr",
            tag("th", check.question, scope="row"),
            tag("td", check.answer, tag("code", check.command) if check.command else None),
            tag("td", MARKS[check.state], class_=f"state {check.state}"),
            tag("td", tag("input", type="checkbox", aria_label=f"Seen: {check.question}"),
                class_="seen"),
        )
        for check in checks
    ]  # fmt: skip
    return tag(
        "table",
        tag("caption", "Questions and answers", class_="hidden"),
        head,
        tag("tbody", *rows),
        id="questions",
        class_="pairs",
    )
