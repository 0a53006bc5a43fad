"""Layers that should move to the CPU, as plain data: rows, `hybrid_dict`, a table, JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bevquant_quantizers import JsonDocument

__all__ = ["CpuMove", "CpuSuggestion"]

_SCHEMA = "bevquant_hybrid.cpu_suggestion"
_VERSION = 1
_NOTE = (
    "Times are estimates by roofline from public figures, not measurements; metrics are measured."
)


@dataclass(frozen=True)
class CpuMove:
    """One layer, or several that only help together, and what moving it does.

    Attributes:
        path: What `hybrid_dict` calls the layer; of several, the first.
        others: The layers that move with it, because the value between them becomes a float.
        gain_alone: By how much the metric grows if nothing else moves.
        metric: The metric with this row and all above it moved; None for what stays.
        milliseconds: Estimated time added behind the rows above it; of what stays, alone.
        transfer_bytes: Bytes added that cross between BPU and CPU, likewise.
        reason: Why it moves, or stays.
    """

    path: str
    others: tuple[str, ...]
    gain_alone: float
    metric: float | None
    milliseconds: float
    transfer_bytes: int
    reason: str

    @property
    def paths(self) -> tuple[str, ...]:
        """All layers of the row."""
        return (self.path, *self.others)

    @property
    def moves(self) -> bool:
        """Whether it is suggested."""
        return self.metric is not None


@dataclass(frozen=True)
class CpuSuggestion(JsonDocument):
    """Which layers should run on the CPU, in the order in which they were picked.

    Attributes:
        march: The BPU architecture.
        metric_name: What was measured; larger is better.
        as_given: The metric of the model as it was given.
        start: The metric where only those layers run on the CPU that must or did so before.
        start_milliseconds: Estimated time of that model for one run.
        kept: What ran on the CPU before by name or without a qconfig, and still does.
        rows: What moves, in order, then what stays, the largest gain first.
    """

    march: str
    metric_name: str
    as_given: float
    start: float
    start_milliseconds: float
    kept: tuple[str, ...]
    rows: tuple[CpuMove, ...]

    @property
    def moves(self) -> tuple[CpuMove, ...]:
        """The rows that are suggested."""
        return tuple(row for row in self.rows if row.moves)

    @property
    def hybrid_dict(self) -> dict[str, list[Any]]:
        """For prepare_calibration_fx and prepare_qat_fx with ``hybrid=True``, and for partition."""
        moved = [path for row in self.moves for path in row.paths]
        return {"module_name": list(dict.fromkeys([*self.kept, *moved]))}

    @property
    def metric(self) -> float:
        """The metric with every suggested layer on the CPU."""
        found = [row.metric for row in self.rows if row.metric is not None]
        return found[-1] if found else self.start

    @property
    def added_milliseconds(self) -> float:
        """Estimated time that all suggested moves add."""
        return math.fsum(row.milliseconds for row in self.moves)

    def __str__(self) -> str:
        moved = sum(len(row.paths) for row in self.moves)
        title = (
            f"{moved} {'layer' if moved == 1 else 'layers'} to the CPU ({self.march}): "
            f"{self.metric_name} {self.start:.2f} -> {self.metric:.2f}, "
            f"estimated time {self.start_milliseconds:.3g} -> "
            f"{self.start_milliseconds + self.added_milliseconds:.3g} ms"
        )
        lines = [title, *_table(self.rows), _NOTE]
        if self.as_given != self.start:
            before = f"With hybrid=True alone the model goes from {self.as_given:.2f} to "
            lines.insert(1, f"{before}{self.start:.2f}: some operators must run on the CPU then.")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The suggestion as JSON; `hybrid_dict` is written along for other readers."""
        data = {
            **{"schema": _SCHEMA, "version": _VERSION, "note": _NOTE},
            **asdict(self),
            "hybrid_dict": self.hybrid_dict,
        }
        return json.dumps(data, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CpuSuggestion:
        """Read and check what `to_json` wrote.

        Raises:
            ValueError: If it is no such JSON, of another version, or contradicts itself.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("schema") != _SCHEMA:
            raise ValueError(f'no CPU suggestion: expected "schema": "{_SCHEMA}"')
        version = data.get("version")
        if type(version) is not int or version != _VERSION:
            raise ValueError(f"suggestion of version {version!r}; this reads {_VERSION}")
        values = {name: _checked(data, name, check) for name, check in _FIELDS.items()}
        values["kept"] = tuple(values["kept"])
        values["rows"] = tuple(_row(i, row) for i, row in enumerate(values["rows"]))
        made = cls(**values)
        if "hybrid_dict" in data and data["hybrid_dict"] != made.hybrid_dict:
            raise ValueError("suggestion: its hybrid_dict is not that of its rows")
        return made


def _table(rows: tuple[CpuMove, ...]) -> list[str]:
    head = ["", "layer", "alone", "metric", "ms", "bytes", "reason"]
    cells = [head]
    for number, row in enumerate(rows, 1):
        cells.append(
            [
                str(number) if row.moves else "-",
                " + ".join(row.paths),
                f"{row.gain_alone:+.2f}",
                "" if row.metric is None else f"{row.metric:.2f}",
                f"{row.milliseconds:+.3g}",
                f"{row.transfer_bytes:+,}",
                row.reason,
            ]
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if 2 <= i <= 5 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_FIELDS = {
    **dict.fromkeys(("march", "metric_name"), _is_text),
    **dict.fromkeys(("as_given", "start", "start_milliseconds"), _is_number),
    "kept": _is_texts,
    "rows": lambda value: isinstance(value, list),
}
_ROW_FIELDS = {
    **dict.fromkeys(("path", "reason"), _is_text),
    **dict.fromkeys(("gain_alone", "milliseconds"), _is_number),
    "others": _is_texts,
    "metric": lambda value: value is None or _is_number(value),
    "transfer_bytes": lambda value: type(value) is int,
}


def _checked(data: Mapping[str, Any], name: str, check: Any) -> Any:
    if name not in data or not check(data[name]):
        raise ValueError(f"suggestion: {name!r} is missing or of the wrong type")
    return data[name]


def _row(index: int, data: object) -> CpuMove:
    if not isinstance(data, Mapping) or set(data) != set(_ROW_FIELDS):
        raise ValueError(f"suggestion: row {index}: expected exactly the keys {[*_ROW_FIELDS]}")
    try:
        values = {name: _checked(data, name, check) for name, check in _ROW_FIELDS.items()}
    except ValueError as error:
        raise ValueError(f"{error} in row {index}") from error
    values["others"] = tuple(values["others"])
    return CpuMove(**values)
