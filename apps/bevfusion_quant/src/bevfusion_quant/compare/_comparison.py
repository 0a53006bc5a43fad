"""What comparing runs gave, and as tables for its page and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bev_data.metrics import Accuracy, accuracy_notes, model_tables
from bev_data.tables import Cell, CellParts, Table, plain_table
from bevfusion_quant.options import PtqOptions, TargetOptions
from bevfusion_quant.report import ReportContent, Section, head, reproduce, setting_text, write_page
from bevfusion_quant.run import PAGE_FILE, RunRecord, RunSettings

__all__ = ["ComparedRun", "Comparison", "comparison_text", "write_comparison_page"]

# Of a run's settings, what tells it from another run of the same float model.
_TOLD = {
    "method": "ranges",
    "weight_bits": "weight bits",
    "rounding": "weights rounded",
    "bias_correction": "biases corrected",
    "fold": "batch norms folded",
    "branch": "branch",
    "quantize_head": "head",
    "quantize_first_layer": "first layer",
    "exclude": "left float",
    "plan": "plan",
}
# What else `ptq` can be told beyond any target's options, under its own name.
_SHARED = {option.name for option in fields(TargetOptions)}
_OTHERS = {
    option.name: option.default
    for option in fields(PtqOptions)
    if option.name not in _SHARED | _TOLD.keys()
}


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs.

    Attributes:
        name: Its name in the tables.
        folder: Where it lies.
        settings: What its config.json says.
        integers: Whether it was run in integers too.
        why_not: Why it was not, where that was asked for.
    """

    name: str
    folder: str
    settings: RunSettings
    integers: bool
    why_not: str = ""

    @property
    def models(self) -> dict[str, str]:
        """Names of its models in the tables, by form: "quantized", "integers"."""
        forms = ("quantized", "integers") if self.integers else ("quantized",)
        return {form: f"{self.name} {form}" for form in forms}

    def told(self) -> dict[str, Any]:
        """The settings that runs of one model can differ in, under the names of tables."""
        told = {title: getattr(self.settings, name) for name, title in _TOLD.items()}
        for name, default in _OTHERS.items():
            told[name.replace("_", " ")] = self.settings.written.get(name, default)
        return {**told, "trained by qat": self.settings.qat is not None}

    def summary(self) -> dict[str, Any]:
        """For summary.json and config.json: where it lies, digests, settings."""
        apart = ("format", "version", "sizes")
        written = self.settings.written
        settings = {key: value for key, value in written.items() if key not in apart}
        return {"run": self.folder, "name": self.name, **settings}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs side by side.

    Attributes:
        runs: In the order given.
        accuracy: Of float, then of each run's models.
    """

    runs: tuple[ComparedRun, ...]
    accuracy: Accuracy

    def differing(self) -> list[str]:
        """Titles of the settings in which the runs differ; of a single run "ranges"."""
        told = [run.told() for run in self.runs]
        differ = [title for title in told[0] if any(t[title] != told[0][title] for t in told)]
        return differ or ["ranges"]

    def left_out(self) -> list[str]:
        """Which runs were not run in integers though that was asked for; a sentence a reason."""
        reasons = dict.fromkeys(run.why_not for run in self.runs if run.why_not)
        return [self._left_for(reason) for reason in reasons]

    def _left_for(self, reason: str) -> str:
        names = [run.name for run in self.runs if run.why_not == reason]
        are = "is" if len(names) == 1 else "are"
        return f"{', '.join(names)} {are} not among the integers: {reason}."


def write_comparison_page(record: RunRecord, comparison: Comparison, frames: Sequence[str]) -> Path:
    """Write report.html: the tables, and how to repeat them.

    Args:
        record: Of the comparison.
        comparison: What was found.
        frames: Names of all frames.
    """
    title, settings = record.path.name, comparison.runs[0].settings
    told = {
        "runs": ", ".join(run.folder for run in comparison.runs),
        "weights": settings.weights,
    }
    content = ReportContent(
        title=title, config=settings.config, frames=frames, **record.on_page(told)
    )
    data = {
        "notes": _notes(comparison),
        "tables": [table.on_page() for table in _tables(comparison)],
    }
    again = reproduce(content)
    sections = [Section("comparison", "Comparison", data), *([] if again is None else [again])]
    return write_page(record.folder / PAGE_FILE, title, head(content), sections)


def comparison_text(comparison: Comparison) -> tuple[str, ...]:
    """Headline, classes, in what the runs differ, and what to know; a model a line."""
    tables = (table.text() for table in _tables(comparison))
    return (*tables, "\n".join(_notes(comparison)))


def _notes(comparison: Comparison) -> list[str]:
    return [*accuracy_notes(comparison.accuracy), *comparison.left_out()]


def _tables(comparison: Comparison) -> tuple[Table, Table, Table]:
    """Every model beside float, class by class, and in what the runs differ."""
    return (*model_tables(comparison.accuracy), _settings(comparison))


def _settings(comparison: Comparison) -> Table:
    titles = comparison.differing()
    heads = ("Run", *map(str.capitalize, titles), "Folder")
    rows: list[Sequence[Cell]] = [
        (
            run.name,
            *(setting_text(run.told()[title]) for title in titles),
            CellParts(text=run.folder, code=True),
        )
        for run in comparison.runs
    ]
    return plain_table("In what the runs differ", heads, rows, form="wide")
