"""The verdict for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bevfusion_quant.review._checks import Check
    from bevfusion_quant.review._run import ReviewResult

__all__ = ["review_text"]

MARKS = {"good": "ok", "look": "LOOK", "missing": "missing"}


def review_text(result: ReviewResult) -> tuple[str, ...]:
    """Headline tables, then each question with its answer, and what would answer the others."""
    tables = [group.table() for group in result.headline]
    parts = [f"{table.title}\n\n{table.text()}" for table in tables]
    return (*parts, "\n".join(_lines(result.checks)), *result.gathered.notes)


def _lines(checks: Sequence[Check]) -> Iterator[str]:
    for check in checks:
        yield f"{MARKS[check.state]:>7}  {check.question} {check.answer}"
        if check.command:
            yield f"{'':9}{check.command}"
