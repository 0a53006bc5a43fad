"""A table that its script sorts and searches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bevfusion_quant.report._html import Html, tag

__all__ = ["Column", "cell", "share", "table_head"]


class Column(NamedTuple):
    """One column.

    Attributes:
        key: Its class in every row.
        title: What its head says.
        note: What its head says when pointed at.
        kind: "name" for the rows' heads, "minor" for what a narrow page leaves out.
        first: How it is sorted at the first click.
        is_text: Sorted as text instead of numbers.
    """

    key: str
    title: str
    note: str
    kind: str = ""
    first: str = "ascending"
    is_text: bool = False


def table_head(columns: Sequence[Column]) -> Html:
    """The heads, each a button that sorts."""
    return tag("thead", tag("tr", *map(_head, columns)))


def _head(column: Column) -> Html:
    button = tag("button", column.title, type="button", title=column.note)
    return tag(
        "th",
        button,
        scope="col",
        data_key=column.key,
        data_first=column.first,
        data_text=column.is_text or None,
        aria_sort="ascending" if column.key == "order" else "none",
        class_=column.kind,
    )


def cell(
    column: Column,
    value: float | str | None,
    shown: Html | str | int,
    bar: float | None = None,
    title: str | None = None,
) -> Html:
    """One value: what it is sorted by, what is shown, a bar of that many per cent below it."""
    kinds = [column.key] + ["minor"] * (column.kind == "minor")
    drawn = None if bar is None else tag("span", class_="bar", style=f"--share:{bar:.1f}%")
    raw = "" if value is None else value if isinstance(value, str) else f"{value:.9g}"
    return tag("td", shown, drawn, data_value=raw, class_=" ".join(kinds), title=title)


def share(value: float | None, whole: float) -> float | None:
    """Length of a bar in per cent."""
    return None if value is None or whole <= 0 else 100 * min(1.0, max(0.0, value) / whole)
