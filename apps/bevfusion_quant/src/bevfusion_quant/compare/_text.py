"""The comparison as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bev_data.metrics import accuracy_notes, aligned_table, points, span

if TYPE_CHECKING:
    from bevfusion_quant.compare._outcome import Comparison

__all__ = ["comparison_text", "setting_text"]


def comparison_text(comparison: Comparison) -> tuple[str, ...]:
    """Headline, classes, in what the runs differ, and what to know; a model a line."""
    accuracy = comparison.accuracy
    headline, classes = [], []
    labelled = [i for i, row in enumerate(accuracy.reference.classes) if row.labels]
    for entry in accuracy.models:
        apart, found = entry.difference, entry.metrics
        known = apart is not None and apart.mean_ap is not None
        headline.append(
            (
                entry.model,
                points(found.mean_ap),
                span(found.interval),
                f"{100 * apart.mean_ap:+.2f}" if known else "",  # type: ignore[union-attr,operator]
                span(apart.interval, signed=True) if apart is not None else "",
                points(found.nds),
            )
        )
        classes.append((entry.model, *(points(found.classes[i].mean_ap) for i in labelled)))
    titles = comparison.differing()
    names = [accuracy.reference.classes[i].name for i in labelled]
    level = f"{accuracy.bootstrap.level:.0%}"
    return (
        aligned_table(("of 100", "mAP", level, "less float", level, "NDS"), headline),
        aligned_table(("AP of 100", *names), classes),
        aligned_table(
            ("run", *titles),
            [(r.name, *(setting_text(r.told()[title]) for title in titles))
             for r in comparison.runs],
        ),
        "\n".join((*accuracy_notes(accuracy), *comparison.left_out())),
    )  # fmt: skip


def setting_text(value: object) -> str:
    """A setting as a cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "–"
    return "–" if value is None else str(value)
