"""The headline table: scores of every model with intervals, beside float."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from bev_data.metrics import AccuracySummary, Interval, ModelSummary, or_dash, points, with_interval
from bev_data.tables import Column, Row, Table
from bevfusion_quant.options import Branch
from bevfusion_quant.report._gather import Evidence, Gathered, frames_text
from bevfusion_quant.run import RunSettings, RunSummary
from bevfusion_quant.stages import quantized_parts

COLUMNS = (
    Column("Model"), Column("mAP, of 100"), Column("less float"), Column("NDS", "minor"),
    Column("SQNR, dB"),
)  # fmt: skip
TITLES = {"ptq": "PTQ", "qat": "QAT", "bpu": "BPU"}


@dataclass(frozen=True)
class HeadlineRow:
    """One model.

    Attributes:
        model: Its name.
        run: Its run, as `Evidence.folder` names it; empty for the float model.
        mean_ap: Mean average precision, 0 to 1; None without labels or a head.
        interval: Interval of `mean_ap`.
        difference: `mean_ap` minus that of the group's float model, on the same frames.
        difference_interval: Paired interval of `difference`.
        nds: nuScenes' score over the errors that the labels allow.
        sqnr_db: 10·log₁₀(Σ float² / Σ (model − float)²) at the output of the last quantized stage;
            None for float, and where it was not measured.
    """

    model: str
    run: str = ""
    mean_ap: float | None = None
    interval: Interval | None = None
    difference: float | None = None
    difference_interval: Interval | None = None
    nds: float | None = None
    sqnr_db: float | None = None


@dataclass(frozen=True)
class HeadlineGroup:
    """Models with scores on the same frames, the float model first.

    Attributes:
        source: The folder with the scores.
        frames: Names of its frames.
        labels: Number of counted labels; None without labels.
        stage: Stage of the SQNR.
        rows: The models.
        missing: Errors that this NDS leaves out.
    """

    source: str
    frames: tuple[str, ...]
    labels: int | None
    stage: str
    rows: tuple[HeadlineRow, ...]
    missing: tuple[str, ...]

    def table(self) -> Table:
        """The group as a table; the title names the frames."""
        rows = [
            Row(
                (
                    row.model,
                    with_interval(points(row.mean_ap), row.interval),
                    "–"
                    if row.difference is None
                    else with_interval(
                        f"{100 * row.difference:+.2f}", row.difference_interval, signed=True
                    ),
                    points(row.nds),
                    or_dash(row.sqnr_db, ".1f"),
                )
            )
            for row in self.rows
        ]
        return Table(f"{self.source}: {frames_text(self.frames)}", COLUMNS, rows)


def run_title(settings: RunSettings) -> str:
    """Title of a run's models, from its settings."""
    bits, title = settings.weight_bits, TITLES[settings.kind]
    return title if bits == 8 else f"{title} W{bits}A8"


def headline(gathered: Gathered) -> tuple[HeadlineGroup, ...]:
    """One group per set of frames: the comparison of several runs, then each run's own."""
    groups = []
    if gathered.comparison is not None:
        groups.append(_of_comparison(gathered, gathered.comparison))
    for measured in gathered.measured:
        evidence = measured.evaluation or measured.run
        group = _of_evaluation(measured.run, evidence)
        if len(group.rows) > 1:
            groups.append(group)
    return tuple(groups)


def headline_group(
    groups: Sequence[HeadlineGroup], run: Evidence
) -> tuple[HeadlineGroup, HeadlineRow] | None:
    """A run's mean average precision on the largest set of frames: of its integers, if they ran."""
    found = [
        (group, row)
        for group in groups
        for row in group.rows
        if row.run == str(run.folder) and row.mean_ap is not None
    ]
    if not found:
        return None
    most = max(len(group.frames) for group, _ in found)
    largest = next(group for group, _ in found if len(group.frames) == most)
    return [(group, row) for group, row in found if group is largest][-1]


def _of_evaluation(run: Evidence, evidence: Evidence) -> HeadlineGroup:
    summary = evidence.summary
    accuracy = summary.accuracy or AccuracySummary()
    stage, decibels = _sqnr(run, summary)
    title = run_title(run.settings)
    names = {"float": "Float", "quantized": title, "integer": f"{title}, integers"}
    models = accuracy.models or dict.fromkeys(("float", *decibels), ModelSummary())
    rows = tuple(
        _row(
            names.get(name, name),
            "" if name == "float" else str(run.folder),
            found,
            decibels.get(name),
        )
        for name, found in models.items()
    )
    return _group(evidence, accuracy, stage, rows)


def _of_comparison(gathered: Gathered, evidence: Evidence) -> HeadlineGroup:
    """Group of a comparison, with models called float, "<run> quantized" and "<run> integers"."""
    accuracy = evidence.summary.accuracy or AccuracySummary()
    there = {entry.name: entry for entry in evidence.settings.compares or ()}
    known = [m.run for m in gathered.measured]
    rows = []
    for name, found in accuracy.models.items():
        run, _, form = name.rpartition(" ")
        if run not in there:
            rows.append(_row(name.capitalize(), "", found))
            continue
        digests = there[run].sha256
        folder = next((str(e.folder) for e in known if e.model_digests == digests), "")
        row_name = (
            f"{run_title(there[run])}, integers" if form == "integers" else run_title(there[run])
        )
        rows.append(_row(f"{row_name} ({run})", folder, found))
    return _group(evidence, accuracy, "", tuple(rows))


def _group(
    evidence: Evidence, accuracy: AccuracySummary, stage: str, rows: tuple[HeadlineRow, ...]
) -> HeadlineGroup:
    first = next(iter(accuracy.models.values()), ModelSummary())
    return HeadlineGroup(
        str(evidence.folder), evidence.frames, accuracy.labels, stage, rows, tuple(first.missing)
    )


def _row(model: str, run: str, found: ModelSummary, sqnr_db: float | None = None) -> HeadlineRow:
    apart = found.difference
    return HeadlineRow(
        model,
        run,
        found.mean_ap,
        found.interval,
        None if apart is None else apart.mean_ap,
        None if apart is None else apart.interval,
        found.nds,
        sqnr_db,
    )


def _sqnr(run: Evidence, summary: RunSummary) -> tuple[str, dict[str, float | None]]:
    settings = run.settings
    branch = cast("Branch", settings.branch)
    last = quantized_parts(branch, settings.model, with_head=settings.quantize_head)[-1]
    for found in (summary.integers, summary.bpu):
        for row in () if found is None else found.stages:
            if row.stage == last:
                return row.title, {"quantized": row.fake_sqnr_db, "integer": row.integer_sqnr_db}
    for row in summary.stages:
        if row.stage == last:
            return row.title, {"quantized": row.sqnr_db}
    return "", {}
