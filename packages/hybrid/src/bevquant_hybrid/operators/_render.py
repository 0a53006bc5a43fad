"""Print the table, as Markdown or as aligned text."""

from __future__ import annotations

from ._table import Operator, Support, SupportTable, load_support_table

__all__ = ["render_support_table"]


def render_support_table(
    march: str | None = None, *, markdown: bool = False, table: SupportTable | None = None
) -> str:
    """The support table as text.

    Args:
        march: Its column alone; None: both columns.
        markdown: A Markdown table with every limit spelled out; else one line per operator and
            one below it for each limit.
        table: Another table than the package's own.

    Example:
        >>> print(render_support_table("bernoulli2").splitlines()[0])
        Operators on BERNOULLI2 (Journey 3, RDK X3)
    """
    table = table or load_support_table()
    marches = list(table.marches.values()) if march is None else [table.march(march)]
    columns = list(dict.fromkeys(m.column for m in marches))
    titles = {
        column: " and ".join(m.title for m in marches if m.column == column) for column in columns
    }
    if markdown:
        return _markdown(table, columns, titles)
    lines = []
    for column in columns:
        chips = ", ".join(m.chips for m in marches if m.column == column)
        lines += [f"Operators on {titles[column]} ({chips})", ""]
        general = next(m.limits for m in marches if m.column == column)
        lines += ["every operator", *(f"    {limit.text}" for limit in general), ""] * bool(general)
        lines += _plain(table, column)
    return "\n".join(lines).rstrip() + "\n"


def _plain(table: SupportTable, column: str) -> list[str]:
    lines: list[str] = []
    unsupported: list[str] = []
    for row in table.operators.values():
        support = row.support.get(column)
        if support is None:
            unsupported.append(row.name)
            continue
        lines.append(f"{row.name:<50} {_flow(support)}")
        lines += [f"    {limit.text}" for limit in support.limits]
        lines += [f"    note: {text}" for text in row.advice]
    return [*lines, "", "not supported", *(f"    {name}" for name in unsupported), ""]


def _markdown(table: SupportTable, columns: list[str], titles: dict[str, str]) -> str:
    head = ["operator", "eager mode", *(titles[c] for c in columns), "remarks"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for row in table.operators.values():
        cells = [f"`{row.name}`", f"`{row.eager}`" if row.eager else ""]
        cells += [_cell(row, column) for column in columns]
        lines.append(f"| {' | '.join([*cells, '<br>'.join(row.advice)])} |")
    return "\n".join(lines) + "\n"


def _cell(row: Operator, column: str) -> str:
    support = row.support.get(column)
    if support is None:
        return "no"
    limits = (f"`{limit.text}`" for limit in support.limits)
    return "<br>".join([_flow(support), *limits])


def _flow(support: Support) -> str:
    inputs = " ".join(support.input) or "any"
    if support.second_input is not None:
        inputs += f", then {' '.join(support.second_input) or 'any'}"
    return f"{inputs} → {support.output if support.output == 'same' else ' '.join(support.output)}"
