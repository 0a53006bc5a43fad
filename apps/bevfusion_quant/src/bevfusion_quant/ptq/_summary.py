"""summary.json and the table on screen: what was done, measured and written."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bevfusion_quant.ptq._compare import LayerRow

__all__ = ["layer_table", "peak_memory_mib", "versions", "write_json"]

PACKAGES = (
    "bevfusion-quant", "bevquant-sparse", "bevquant-fusion", "bevquant-quantizers", "bevquant-qnn",
    "torch", "numpy", "numba", "spconv",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of Python and of every package that decides the result; absent ones left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def peak_memory_mib() -> float:
    """Largest resident memory of this process so far, in MiB, as the kernel counts it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write JSON that any reader takes: no NaN, no Infinity."""
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False, default=_plain)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no place in a summary")


def layer_table(rows: Sequence[LayerRow]) -> str:
    """The per-layer table as text of at most 100 columns."""
    head = ("layer", "channels", "rows", "SQNR dB", "cosine", "saturated %", "input amax")
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    lines = ["  ".join(_aligned(line, widths)) for line in cells]
    lines.insert(1, "  ".join("─" * w for w in widths))
    return "\n".join(lines)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        line[0].ljust(widths[0]),
        *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)),
    ]


def _cells(row: LayerRow) -> tuple[str, ...]:
    name = row.layer.removeprefix("encoders.lidar.backbone.")
    return (
        name if row.kind != "bird's-eye view" else "output (bird's-eye view)",
        str(row.channels),
        f"{row.rows:,.0f}",
        _number(row.sqnr_db, ".1f"),
        _number(row.cosine, ".6f"),
        _number(None if row.saturated is None else row.saturated * 100, ".3f"),
        _number(row.input_amax, ".4g"),
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
