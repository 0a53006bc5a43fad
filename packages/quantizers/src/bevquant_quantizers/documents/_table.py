"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence


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
