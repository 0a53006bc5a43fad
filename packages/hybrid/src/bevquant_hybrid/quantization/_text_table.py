"""Columns of text, aligned."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["text_table"]


def text_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Lines of cells with two blanks between columns; columns in ``right`` end together.

    Example:
        >>> print(text_table([["layer", "us"], ["conv", "7"]], right=[1]))
        layer  us
        conv    7
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
