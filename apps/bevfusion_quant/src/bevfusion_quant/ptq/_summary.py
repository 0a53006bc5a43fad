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

from bev_data.metrics import aligned_table
from bevquant_quantizers.documents import write_whole

if TYPE_CHECKING:
    from bevfusion_quant.ptq._agreement import AgreementRow, FoundRow
    from bevfusion_quant.ptq._compare import LayerRow
    from bevfusion_quant.ptq._stage_maps import StageRow

__all__ = [
    "agreement_text",
    "layer_table",
    "or_dash",
    "peak_memory_mib",
    "short_names",
    "stage_table",
    "versions",
    "write_json",
]  # fmt: skip

PACKAGES = (
    "bevfusion-quant", "bevquant-sparse", "bevquant-fusion", "bevquant-quantizers", "bevquant-qnn",
    "bevquant-int8sim", "torch", "numpy", "numba", "spconv",
)  # fmt: skip


def versions(*more: str) -> dict[str, str]:
    """Versions of Python and of every package that decides the result; absent ones left out.

    Args:
        *more: Packages that this run needed besides.
    """
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *more):
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
    return write_whole(path, text + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no place in a summary")


def layer_table(rows: Sequence[LayerRow]) -> str:
    """The per-layer table as text of at most 100 columns."""
    head = ("layer", "channels", "rows", "SQNR dB", "cosine", "saturated %", "input amax")
    names = short_names(rows)
    return aligned_table(head, [_cells(name, row) for name, row in zip(names, rows, strict=True)])


def stage_table(rows: Sequence[StageRow]) -> str:
    """One line for each stage."""
    head = ("stage", "channels", "SQNR dB", "cosine")
    return aligned_table(
        head,
        [
            (r.title, str(r.channels), or_dash(r.sqnr_db, ".1f"), or_dash(r.cosine, ".6f"))
            for r in rows
        ],
    )


def agreement_text(
    agreement: Sequence[AgreementRow], found: Sequence[FoundRow], other: str = "quantized"
) -> str:
    """How many detections of float and `other` model match, and how many labels they find."""
    head = ("within", "float", other, "matched", "mean |Δscore|", "max |Δscore|")
    text = aligned_table(
        head,
        [
            (
                f"{r.distance:g} m",
                str(r.float_detections),
                str(r.quantized_detections),
                str(r.matched),
                or_dash(r.score_mean, ".4f"),
                or_dash(r.score_max, ".4f"),
            )
            for r in agreement
        ],
    )
    if not found:
        return text
    columns = ("within", "labels", "found by float", f"found by {other}")
    cells = [
        (f"{r.distance:g} m", str(r.labels), str(r.found_float), str(r.found_quantized))
        for r in found
    ]
    return f"{text}\n\n{aligned_table(columns, cells)}"


def short_names(rows: Sequence[LayerRow]) -> list[str]:
    """Layer names without what they all begin with."""
    paths = [row.layer for row in rows if row.layer != "output"]
    lidar = "encoders.lidar.backbone."
    prefix = lidar if all(path.startswith(lidar) for path in paths) else "encoders."
    return [
        f"output ({row.kind})" if row.layer == "output" else row.layer.removeprefix(prefix)
        for row in rows
    ]


def _cells(name: str, row: LayerRow) -> tuple[str, ...]:
    return (
        name,
        str(row.channels),
        f"{row.rows:,.0f}",
        or_dash(row.sqnr_db, ".1f"),
        or_dash(row.cosine, ".6f"),
        or_dash(None if row.saturated is None else row.saturated * 100, ".3f"),
        or_dash(row.input_amax, ".4g"),
    )


def or_dash(value: float | None, form: str) -> str:
    """A number in the given form, a dash for None."""
    return "–" if value is None else format(value, form)
