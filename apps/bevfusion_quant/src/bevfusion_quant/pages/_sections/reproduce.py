"""Settings, versions and times of the steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bev_data.tables import Cell, CellParts, Table, plain_table
from bevfusion_quant.pages._content import ReportContent
from bevfusion_quant.pages._format import setting_text
from bevfusion_quant.pages._page import Section

ORDER = 110


def section(content: ReportContent) -> Section | None:
    """The tables that have content."""
    tables = list(_tables(content))
    return Section("reproduce", "Reproduce", tables) if tables else None


def _tables(content: ReportContent) -> Iterator[Table]:
    told = {**content.settings}
    if told.get("calibration_frames") == 0:
        told["calibration_frames"] = "all"
    settings = {k.replace("_", " "): setting_text(v) for k, v in told.items()}
    for title, pairs in ("Settings", settings), ("Versions", content.versions):
        if pairs:
            yield plain_table(title, ("", ""), pairs.items(), "")
    if any(content.seconds.values()):
        yield plain_table("Time", ("", ""), _times(content.seconds), "times")


def _times(seconds: Mapping[str, float]) -> Iterator[tuple[Cell, ...]]:
    total = seconds.get("total") or sum(seconds.values())
    for step, spent in seconds.items():
        bar = None if step == "total" else 100 * spent / total
        yield step, CellParts(text=f"{spent:.2f} s", bar=bar)
