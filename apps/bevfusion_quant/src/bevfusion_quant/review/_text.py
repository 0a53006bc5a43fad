"""The verdict for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bev_data.metrics import aligned_table, points, span
from bevfusion_quant.measure import or_dash
from bevfusion_quant.review._evidence import frames_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bevfusion_quant.review._checks import Check
    from bevfusion_quant.review._headline import HeadlineGroup
    from bevfusion_quant.review._run import ReviewResult

__all__ = ["review_text"]

MARKS = {"good": "ok", "look": "LOOK", "missing": "missing"}


def review_text(result: ReviewResult) -> tuple[str, ...]:
    """Headline tables, then each question with its answer, and what would answer the others."""
    parts = [_table(group) for group in result.headline]
    return (*parts, "\n".join(_lines(result.checks)), *result.gathered.notes)


def _table(group: HeadlineGroup) -> str:
    head = ("model", "mAP", "interval", "less float", "interval", "SQNR dB")
    rows = [
        (
            row.model,
            points(row.mean_ap),
            span(row.interval),
            "–" if row.difference is None else f"{100 * row.difference:+.2f}",
            span(row.difference_interval, signed=True),
            or_dash(row.sqnr_db, ".1f"),
        )
        for row in group.rows
    ]
    return f"{group.source}: {frames_text(group.frames)}\n\n{aligned_table(head, rows)}"


def _lines(checks: Sequence[Check]) -> Iterator[str]:
    for check in checks:
        yield f"{MARKS[check.state]:>7}  {check.question} {check.answer}"
        if check.command:
            yield f"{'':9}{check.command}"
