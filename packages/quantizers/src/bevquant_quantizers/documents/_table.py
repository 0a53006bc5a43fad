"""Tables for a terminal, and the content of their cells."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import isfinite
from string import Formatter
from typing import Any

DASH = "–"


def text_table(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), rule: str = ""
) -> str:
    """Lines of cells with two blanks between columns, and none at the end of a line.

    Args:
        rows: The heads, then the rows; all of one length.
        right: Numbers of the columns that end together; the others begin together.
        rule: The sign of which a line below the heads is made; "" for none.

    Raises:
        ValueError: Rows of several lengths.

    Example:
        >>> print(text_table([["layer", "us"], ["conv", "7"]], right=[1], rule="-"))
        layer  us
        -----  --
        conv    7
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if rule:
        lines.insert(1, "  ".join(rule * width for width in widths))
    return "\n".join(lines)


class _Attributes(Formatter):
    """Names in a text are attributes of the only argument."""

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        return getattr(args[0], str(key))

    def format_field(self, value: Any, format_spec: str) -> Any:
        if value is None or (isinstance(value, float) and not isfinite(value)):
            return DASH
        if format_spec.startswith("100*"):
            value, format_spec = 100 * value, format_spec.removeprefix("100*")
        return super().format_field(value, format_spec)


def filled(record: object, texts: Iterable[str]) -> tuple[str, ...]:
    """Texts with a record's attributes in them: the cells of its row.

    They are written as `str.format` has them. "100*" before a form is for per cent. A dash stands
    for None, NaN and infinity.

    Example:
        >>> filled(slice(0.5, None), ["{start:.2f} s", "{start:100*.0f} %", "{stop:.1f}"])
        ('0.50 s', '50 %', '–')
    """
    return tuple(_Attributes().vformat(text, (record,), {}) for text in texts)


def record_table(records: Iterable[object], columns: Mapping[str, str]) -> str:
    """A `text_table` of records, a line below the heads and all columns but the first to the right.

    Args:
        records: One per row.
        columns: Content by head, such as "{start:.2f} s"; see `filled`.

    Example:
        >>> print(record_table([slice(0.5, 12)], {"from": "{start:.2f} s", "to": "{stop} s"}))
        from      to
        ──────  ────
        0.50 s  12 s
    """
    rows = [tuple(columns), *(filled(record, columns.values()) for record in records)]
    return text_table(rows, right=range(1, len(columns)), rule="─")
