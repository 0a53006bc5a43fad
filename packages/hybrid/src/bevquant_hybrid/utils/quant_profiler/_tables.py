"""Tables as text, in the two forms that the documents print."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Cell", "grid_table", "simple_table"]

Cell = str | int


def simple_table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Columns under dashes.

    A column whose cells are all integers stands to the right, any other to the left; a column is
    at least two wider than its title.

    Example:
        >>> print(simple_table(["name", "called times"], [["conv", 1], ["pool.0", 12]]))
        name      called times
        ------  --------------
        conv                 1
        pool.0              12
    """
    columns = _columns(header, rows)
    rule = "  ".join("-" * width for width, _ in columns)
    lines = [_joined(header, columns), rule, *(_joined(row, columns) for row in rows)]
    return "\n".join(line.rstrip() for line in lines)


def grid_table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Columns between bars; a title may have several lines.

    Example:
        >>> print(grid_table(["Weight Name", "ch_axis"], [["conv.weight", 0]]))
        +---------------+-----------+
        | Weight Name   |   ch_axis |
        |---------------+-----------|
        | conv.weight   |         0 |
        +---------------+-----------+
    """
    columns = _columns(header, rows)
    dashes = ["-" * (width + 2) for width, _ in columns]
    edge = f"+{'+'.join(dashes)}+"
    titles = [title.split("\n") for title in header]
    deepest = max(len(lines) for lines in titles)
    heads = [[lines[i] if i < len(lines) else "" for lines in titles] for i in range(deepest)]
    body = [f"| {_joined(row, columns, ' | ')} |" for row in [*heads, *rows]]
    rule = f"|{'+'.join(dashes)}|"
    return "\n".join([edge, *body[:deepest], rule, *body[deepest:], edge])


def _columns(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[tuple[int, bool]]:
    """Width of each column, and whether it stands to the right."""
    columns = []
    for i, title in enumerate(header):
        cells = [row[i] for row in rows]
        longest = max(len(line) for line in title.split("\n"))
        width = max([longest + 2, *(len(str(cell)) for cell in cells)])
        columns.append((width, bool(cells) and all(isinstance(cell, int) for cell in cells)))
    return columns


def _joined(row: Sequence[Cell], columns: Sequence[tuple[int, bool]], gap: str = "  ") -> str:
    return gap.join(
        str(cell).rjust(width) if right else str(cell).ljust(width)
        for cell, (width, right) in zip(row, columns, strict=True)
    )
