"""Layers that should move to the CPU, as plain data: rows, `hybrid_dict`, a table, JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from bevquant_quantizers.documents import (
    DocumentError,
    Finite,
    JsonDocument,
    parse_json,
    text_table,
)

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
        lines = [title, _table(self.rows), _NOTE]
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
        data = parse_json(
            text,
            _Document,
            what="CPU suggestion",
            head={"schema": _SCHEMA, "version": _VERSION},
            remedy="suggest again with this version",
        )
        rows = tuple(CpuMove(**msgspec.structs.asdict(row)) for row in data.rows)
        numbers = (data.as_given, data.start, data.start_milliseconds)
        made = cls(data.march, data.metric_name, *numbers, data.kept, rows)
        if data.hybrid_dict is not None and data.hybrid_dict != made.hybrid_dict:
            raise DocumentError("not a CPU suggestion: its hybrid_dict is not that of its rows")
        return made


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    others: tuple[str, ...]
    gain_alone: Finite
    metric: Finite | None
    milliseconds: Finite
    transfer_bytes: int
    reason: str


class _Document(msgspec.Struct):
    march: str
    metric_name: str
    as_given: Finite
    start: Finite
    start_milliseconds: Finite
    kept: tuple[str, ...]
    rows: list[_Row]
    hybrid_dict: Any = None


def _table(rows: tuple[CpuMove, ...]) -> str:
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
    return text_table(cells, right=range(2, 6))
