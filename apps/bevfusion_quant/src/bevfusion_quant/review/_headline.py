"""The headline table: every model that was judged, with intervals, beside float."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bevfusion_quant.metrics import Interval
from bevfusion_quant.ptq._branches import quantized_parts

if TYPE_CHECKING:
    from bevfusion_quant.review._evidence import Evidence
    from bevfusion_quant.review._gather import Gathered

__all__ = ["HeadlineGroup", "HeadlineRow", "headline", "run_title"]

TITLES = {"ptq": "PTQ", "qat": "QAT", "bpu": "BPU"}


@dataclass(frozen=True)
class HeadlineRow:
    """One model.

    Attributes:
        model: Its name.
        mean_ap: Mean average precision, 0 to 1; None without labels or a head.
        interval: Of `mean_ap`.
        difference: `mean_ap` less that of the group's float model, on the same frames.
        difference_interval: Of `difference`, paired.
        nds: nuScenes' score over the errors that can be told.
        sqnr_db: 10·log₁₀(Σ float² / Σ (model − float)²) at the end of the last quantized stage;
            None of float, and where it was not measured.
    """

    model: str
    mean_ap: float | None = None
    interval: Interval | None = None
    difference: float | None = None
    difference_interval: Interval | None = None
    nds: float | None = None
    sqnr_db: float | None = None


@dataclass(frozen=True)
class HeadlineGroup:
    """Models judged on the same frames, the float one first.

    Attributes:
        source: The folder that says so.
        frames: Names of its frames.
        labels: How many labels counted; None without any.
        stage: Where SQNR was taken.
        rows: The models.
        missing: Errors of nuScenes' score that NDS is without.
    """

    source: str
    frames: tuple[str, ...]
    labels: int | None
    stage: str
    rows: tuple[HeadlineRow, ...]
    missing: tuple[str, ...]

    @property
    def last(self) -> HeadlineRow:
        """The model nearest to what will be deployed: integers, where they ran."""
        return self.rows[-1]


def run_title(run: Evidence) -> str:
    """How a run's models are called."""
    bits = run.config.get("weight_bits", 8)
    title = TITLES[run.kind]
    return title if bits == 8 else f"{title} W{bits}A8"


def headline(gathered: Gathered) -> tuple[HeadlineGroup, ...]:
    """A group for each set of frames: the comparison of several runs, then each run's own."""
    groups = []
    if gathered.comparison is not None:
        groups.append(_of_comparison(gathered, gathered.comparison))
    for measured in gathered.measured:
        evidence = measured.evaluation or measured.run
        group = _of_evaluation(measured.run, evidence)
        if len(group.rows) > 1:
            groups.append(group)
    return tuple(groups)


def _of_evaluation(run: Evidence, evidence: Evidence) -> HeadlineGroup:
    summary = evidence.summary
    accuracy = summary.get("accuracy") or {}
    stage, decibels = _sqnr(run, summary)
    title = run_title(run)
    names = {"float": "Float", "quantized": title, "integer": f"{title}, integers"}
    models = accuracy.get("models") or dict.fromkeys(("float", *decibels), None)
    rows = tuple(
        _row(names.get(name, name), found, decibels.get(name)) for name, found in models.items()
    )
    return _group(evidence, accuracy, stage, rows)


def _of_comparison(gathered: Gathered, evidence: Evidence) -> HeadlineGroup:
    accuracy = evidence.summary.get("accuracy") or {}
    titles = {m.run.folder.name: run_title(m.run) for m in gathered.measured}
    rows = tuple(_row(_compared(name, titles), found) for name, found in accuracy["models"].items())
    return _group(evidence, accuracy, "", rows)


def _compared(name: str, titles: Mapping[str, str]) -> str:
    """The name of a model of `compare`: the run's, then "quantized" or "integers"."""
    if name == "float":
        return "Float"
    run, _, form = name.rpartition(" ")
    told = f"{titles[run]} ({run})" if run in titles else run
    return told if form == "quantized" else f"{told}, {form}"


def _group(
    evidence: Evidence, accuracy: Mapping[str, Any], stage: str, rows: tuple[HeadlineRow, ...]
) -> HeadlineGroup:
    models = accuracy.get("models") or {}
    first: Mapping[str, Any] = next(iter(models.values()), {})
    return HeadlineGroup(
        str(evidence.folder),
        evidence.frames,
        accuracy.get("labels"),
        stage,
        rows,
        tuple(first.get("missing", ())),
    )


def _row(model: str, found: Mapping[str, Any] | None, sqnr_db: float | None = None) -> HeadlineRow:
    found = found or {}
    apart = found.get("difference") or {}
    return HeadlineRow(
        model,
        found.get("mean_ap"),
        _interval(found.get("interval")),
        apart.get("mean_ap"),
        _interval(apart.get("interval")),
        found.get("nds"),
        sqnr_db,
    )


def _interval(found: Mapping[str, Any] | None) -> Interval | None:
    return None if found is None else Interval(**found)


def _sqnr(run: Evidence, summary: Mapping[str, Any]) -> tuple[str, dict[str, float | None]]:
    """Title of the last quantized stage, and its SQNR by model."""
    branch = run.config.get("branch", "lidar")
    last = quantized_parts(branch, with_head=run.config.get("quantize_head", False))[-1]
    for row in _three_ways(summary):
        if row["stage"] == last:
            return row["title"], {
                "quantized": row["fake_sqnr_db"], "integer": row["integer_sqnr_db"],
            }  # fmt: skip
    for row in summary.get("stages", ()):
        if row["stage"] == last:
            return row["title"], {"quantized": row["sqnr_db"]}
    return "", {}


def _three_ways(summary: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Stages with a fake-quantized and an integer model, of a simulation and of a BPU's run."""
    for part in ("integers", "bpu"):
        yield from (summary.get(part) or {}).get("stages", ())
