"""Results as HTML in notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any


class HtmlText:
    """A result that a notebook shows as its printed text."""

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


class HtmlTable:
    """A dataclass that a notebook shows as one HTML table.

    Each record (a dataclass in a field that is a tuple) is a row. The caption has the other fields.
    Texts such as warnings, and nested results, are below the table.
    """

    def _repr_html_(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}  # type: ignore[arg-type]
        listed = [(n, m) for n, v in values.items() if isinstance(v, tuple) for m in v]
        records = [(name, member) for name, member in listed if is_dataclass(member)]
        heads = dict.fromkeys(f.name for _, record in records for f in fields(record) if f.repr)
        rows = [(name, *(_cell(getattr(r, head, "")) for head in heads)) for name, r in records]
        lines = [f"{name}: {member}" for name, member in listed if isinstance(member, str)]
        lines += [str(value) for value in values.values() if isinstance(value, HtmlTable)]
        said = {n: _cell(v) for n, v in values.items() if not isinstance(v, tuple | HtmlTable)}
        caption = "; ".join([type(self).__name__, *(f"{n}: {c}" for n, c in said.items() if c)])
        head = "".join(f"<th>{escape(name)}</th>" for name in ("", *heads))
        body = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>" for row in rows)
        below = "".join(f"<p>{escape(line)}</p>" for line in lines)
        table = f"<caption>{escape(caption)}</caption><tr>{head}</tr>{body}"
        return f"<table>{table}</table>{below}"


def _cell(value: Any) -> str:
    if isinstance(value, tuple | Mapping):
        if isinstance(value, Mapping):
            value = tuple(f"{key}: {_cell(member)}" for key, member in value.items())
        cells = list(map(_cell, value))
        long = len(cells) > 4 and not isinstance(value[0], str)
        return ", ".join(cells[:3]) + f", … ({len(cells)})" if long else ", ".join(cells)
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
