"""The common form of a table, for pages and terminals.

`table_of` makes one from records. `Table.text` is printed on a terminal; `Table.on_page` is drawn
on a page, where cells may hold more than text. `or_dash`, `percent` and `plural` format numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, NamedTuple, TypedDict

from bevquant_quantizers.documents import filled, text_table

__all__ = [
    "Cell",
    "CellParts",
    "Column",
    "Columns",
    "Row",
    "Table",
    "aligned_table",
    "finite",
    "number_cell",
    "or_dash",
    "percent",
    "plain_table",
    "plural",
    "share",
    "table_of",
]
DASH = "–"


class CellParts(TypedDict, total=False):
    """A cell with more than text.

    Attributes:
        text: Its text.
        path: A module's path, shown instead of text.
        paths: Several paths, separated by commas.
        arrow: A path from which an arrow points to `paths`.
        value: Sort key; None is sorted last.
        bar: Length of a bar below it, in per cent.
        note: Small print below.
        note_path: A path in small print below.
        more: Further paths in small print.
        href: The id that the text links to.
        title: Tooltip.
        interval: An interval below the text.
        code: Whether the text is a name on disk or a command.
        badge: Class of a mark around the text.
        bars: Bars to draw: the common `height`, a `label`, and `blocks`, each with its `kind`,
            `left`, `top`, `width` and `height`; 100 is the width of the cell.
    """

    text: str
    path: str
    paths: Sequence[str]
    arrow: str
    value: float | str | None
    bar: float | None
    note: str
    note_path: str
    more: Sequence[str]
    href: str
    title: str
    interval: str
    code: bool
    badge: str
    bars: object


Cell = str | CellParts
"""Text, or more than that."""


class Column(NamedTuple):
    """One column.

    Attributes:
        title: Its head.
        kind: Classes of its cells: "minor" if a narrow page may leave it out.
        key: Name for the page's script, in a table that is sorted or counted.
        note: Tooltip of its head.
        first: Sort order at the first click.
        is_text: Whether it is sorted as text instead of numbers.
        only: "page" or "terminal" if only that one shows it.
    """

    title: str
    kind: str = ""
    key: str = ""
    note: str = ""
    first: str = "ascending"
    is_text: bool = False
    only: str = ""


Columns = Mapping[Any, str | Callable[[Any], Cell]]
"""Each column, or its head, to what fills it; see `table_of`."""


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        cells: One per column, the row's head first.
        id: Id of the row, if a link leads to it.
        kind: Its class: "low" for rows to check.
        part: Its part of the model.
        search: Text for the search.
        name: Name for the counts of the page's script.
    """

    cells: Sequence[Cell]
    id: str = ""
    kind: str = ""
    part: str = ""
    search: str = ""
    name: str = ""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: Its title.
        columns: Its columns.
        rows: Its rows.
        form: "pairs" for a small table, "wide" for one that scrolls sideways, "long" for one in a
            box that scrolls, "sorted" for one that can be sorted and searched.
        id: Id of the table on a page.
        kind: Further classes.
        hidden: Whether the title is for screen readers alone.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    form: str = "pairs"
    id: str = ""
    kind: str = "classes"
    hidden: bool = False

    def text(self, without: str = "") -> str:
        """Head and rows for a terminal.

        Args:
            without: Beginning of modules' paths that is left out.
        """
        shown = self._shown("terminal")
        heads = [_small(column.title) for column in shown.columns]
        rows = [[_text(cell, without) for cell in row.cells] for row in shown.rows]
        return aligned_table(heads, rows)

    def on_page(self) -> Table:
        """The columns that a page shows."""
        return self._shown("page")

    def _shown(self, where: str) -> Table:
        kept = [i for i, column in enumerate(self.columns) if column.only in ("", where)]
        rows = [replace(row, cells=[row.cells[i] for i in kept]) for row in self.rows]
        return replace(self, columns=[self.columns[i] for i in kept], rows=rows)


def aligned_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under their heads: the first one to the left, the others to the right.

    Example:
        >>> print(aligned_table(("frame", "boxes"), [("street_0", "12"), ("street_1", "7")]))
        frame     boxes
        ────────  ─────
        street_0     12
        street_1      7
    """
    return text_table([head, *rows], right=range(1, len(head)), rule="─")


def plain_table(
    title: str,
    heads: Iterable[str],
    rows: Iterable[Sequence[Cell]],
    kind: str = "classes",
    form: str = "pairs",
) -> Table:
    """A table of titles and cells, nothing else said of them."""
    columns = [Column(head) for head in heads]
    return Table(title, columns, [Row(row) for row in rows], form, kind=kind)


def table_of(
    title: str,
    records: Iterable[Any],
    columns: Columns,
    form: str = "pairs",
    kind: str = "classes",
    id: str = "",
) -> Table:
    """A table of records.

    Args:
        title: Its title.
        records: One per row.
        columns: Content by column, or by its head: a text such as "{distance:g} m" with the
            attribute `distance` (see `bevquant_quantizers.documents.filled`), or a function.
        form: Form of the table.
        kind: Further classes.
        id: Id of the table on a page.

    Example:
        >>> table = table_of("Parts", [slice(0, 2.5)], {"From": "{start}", "To": "{stop:.2f} s"})
        >>> print(table.text())
        from      to
        ────  ──────
        0     2.50 s
    """
    heads = [Column(column) if isinstance(column, str) else column for column in columns]
    rows = [
        Row([text(one) if callable(text) else filled(one, (text,))[0] for text in columns.values()])
        for one in records
    ]
    return Table(title, heads, rows, form, id, kind)


def finite(value: float | None) -> float | None:
    """The number, or None for NaN and infinity too, which can be neither sorted nor drawn."""
    return value if value is not None and isfinite(value) else None


def or_dash(value: float | None, form: str) -> str:
    """A number in the given form; a dash for None, NaN and infinity.

    Examples:
        >>> or_dash(26404.4, ",.0f"), or_dash(None, ".2f"), or_dash(float("nan"), ".4g")
        ('26,404', '–', '–')
    """
    return DASH if value is None or not isfinite(value) else format(value, form)


def number_cell(value: float | None, form: str) -> CellParts:
    """A number in the given form, by which its column is sorted; NaN and infinity come last.

    Examples:
        >>> number_cell(26.52, ".1f"), number_cell(float("-inf"), ".1f")
        ({'text': '26.5', 'value': 26.52}, {'text': '–', 'value': None})
    """
    return CellParts(text=or_dash(value, form), value=finite(value))


def percent(share: float | None) -> str:
    """A share as per cent, small ones not rounded away.

    Examples:
        >>> percent(0.0), percent(0.1234), percent(1e-7)
        ('0 %', '12.3 %', '< 0.001 %')
    """
    if share is None or not isfinite(share):
        return DASH
    if share == 0:
        return "0 %"
    if share < 1e-5:
        return "< 0.001 %"
    if share >= 0.01:
        return f"{share * 100:.1f} %"
    return f"{float(f'{share * 100:.2g}')!r} %"


def plural(number: int | None, thing: str) -> str:
    """A number of things.

    Examples:
        >>> plural(1, "step"), plural(None, "step"), plural(1200, "label")
        ('1 step', '0 steps', '1,200 labels')
    """
    return f"{number or 0:,} {thing}{'s' * (number != 1)}"


def share(value: float | None, whole: float) -> float | None:
    """Length of a bar in per cent, as `CellParts` has it."""
    known = finite(value)
    return None if known is None or whole <= 0 else 100 * min(1.0, max(0.0, known) / whole)


def _text(cell: Cell, without: str) -> str:
    if isinstance(cell, str):
        return cell
    if "path" in cell:
        more = len(cell.get("more", ()))
        return cell["path"].removeprefix(without) + (f" +{more}" if more else "")
    if "paths" in cell:
        return f"{cell['arrow']} → {', '.join(cell['paths'])}"
    shown = cell.get("text", "")
    return f"{shown} ({cell['interval']})" if cell.get("interval") else shown


def _small(head: str) -> str:
    """A head as a terminal has it: its first letter small, but for abbreviations."""
    return head if head[1:2].isupper() else head[:1].lower() + head[1:]
