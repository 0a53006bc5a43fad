"""Metrics as text and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bev_data.tables import (
    DASH,
    Cell,
    CellParts,
    Column,
    Row,
    Table,
    aligned_table,
    or_dash,
    plain_table,
    plural,
)
from bevquant_quantizers.documents import record_table

if TYPE_CHECKING:
    from bev_data.metrics._agreement import AgreementRow, FoundRow
    from bev_data.metrics._bootstrap import Interval
    from bev_data.metrics._evaluate import Accuracy, Difference, ModelAccuracy

ERROR_UNITS = {"ATE": "m", "ASE": "1 − IoU", "AOE": "rad", "AVE": "m/s"}
_WIDE, _HIGH = 100.0, 12.0  # of a bar, in its own units


def accuracy_text(accuracy: Accuracy) -> str:
    """Headline figures by model, average precision by class, and notes."""
    names = [entry.model for entry in accuracy.models]
    head = ("of 100", *names)
    return "\n\n".join(
        (
            aligned_table(head, list(_headline(accuracy))),
            aligned_table(("class, AP of 100", "labels", *names), _by_class(accuracy)),
            "\n".join(accuracy_notes(accuracy)),
        )
    )


def accuracy_notes(accuracy: Accuracy) -> Iterator[str]:
    """Notes about the figures, one sentence per line."""
    reference = accuracy.reference
    others = f", {accuracy.unlabelled} more without labels" if accuracy.unlabelled else ""
    objects, frames = (
        plural(n, what)
        for n, what in ((reference.labels, "labelled object"), (reference.frames, "frame"))
    )
    yield f"{objects} in {frames}{others}."
    ranges, fewest = accuracy.rules.class_ranges.values(), accuracy.rules.min_points
    seen = f", and with {plural(fewest, 'LiDAR point')} or more" if fewest else ""
    yield f"Counted: up to the range of their class, {min(ranges):g} to {max(ranges):g} m{seen}."
    interval = reference.interval
    if interval is None:
        yield "No intervals: they need resamples, two scenes or more, and labels."
    else:
        yield (
            f"Intervals: {interval.level:.0%} of {accuracy.bootstrap.resamples:,} bootstrap "
            f"resamples of {interval.scenes:,} {accuracy.drawn}, seed {accuracy.bootstrap.seed}; "
            "differences are paired."
        )
    if reference.absent:
        how = {"left out": "left out of every mean", "zero": "counted as 0"}[accuracy.rules.absent]
        yield f"No counted labels of {', '.join(reference.absent)}: {how}."
    reasons = {"AVE": "velocities are not labelled", "AAE": "boxes have no attributes"}
    left_out = [f"{name} ({reasons[name]})" for name in reference.missing if name in reasons]
    if left_out and reference.mean_ap is not None:
        yield f"NDS is without {' and '.join(left_out)}, so not comparable with nuScenes' tables."


def nds_title(accuracy: Accuracy) -> str:
    """Title "NDS", with the errors that it leaves out."""
    return f"NDS without {', '.join(accuracy.reference.missing)}"


def points(value: float | None) -> str:
    """A share as points of 100."""
    return DASH if value is None else f"{100 * value:.2f}"


def span(interval: Interval | None, *, signed: bool = False) -> str:
    """An interval in points of 100."""
    if interval is None:
        return DASH
    form = "+.2f" if signed else ".2f"
    return f"{100 * interval.low:{form}} … {100 * interval.high:{form}}"


def with_interval(value: str, interval: Interval | None, *, signed: bool = False) -> Cell:
    """A figure, its interval below it."""
    if interval is None:
        return value
    return CellParts(text=value, interval=span(interval, signed=signed))


def _headline(accuracy: Accuracy) -> Iterator[tuple[str, ...]]:
    rows = [entry.metrics for entry in accuracy.models]
    yield ("mAP", *(points(row.mean_ap) for row in rows))
    yield ("  interval", *(span(row.interval) for row in rows))
    apart = [entry.difference for entry in accuracy.models]
    if any(apart):
        values = [None if d is None or d.mean_ap is None else d.mean_ap for d in apart]
        yield (
            f"  less {accuracy.models[0].model}",
            *(DASH if v is None else f"{100 * v:+.2f}" for v in values),
        )
        yield ("  interval", *(DASH if d is None else span(d.interval, signed=True)
                               for d in apart))  # fmt: skip
    yield from _without_intervals(accuracy, ".4f")


def _without_intervals(accuracy: Accuracy, error_form: str) -> Iterator[tuple[str, ...]]:
    """Every figure but mAP, model by model."""
    rows = [entry.metrics for entry in accuracy.models]
    for distance in accuracy.rules.distances:
        yield (f"AP, {distance:g} m", *(points(row.average_precision[distance]) for row in rows))
    yield (nds_title(accuracy), *(points(row.nds) for row in rows))
    for error, unit in ERROR_UNITS.items():
        yield (f"{error}, {unit}", *(or_dash(row.errors[error], error_form) for row in rows))
    for overlap in accuracy.rules.overlaps:
        yield (f"BEV AP, IoU {overlap:g}", *(points(row.bev_ap[overlap]) for row in rows))


def agreement_text(
    agreement: Sequence[AgreementRow], found: Sequence[FoundRow], other: str = "quantized"
) -> str:
    """How many detections of float and `other` model match, and how many labels they find."""
    columns = {
        "within": "{distance:g} m",
        "float": "{float_detections}",
        other: "{quantized_detections}",
        "matched": "{matched}",
        "mean |Δscore|": "{score_mean:.4f}",
        "max |Δscore|": "{score_max:.4f}",
    }
    tables = [record_table(agreement, columns)]
    if found:
        columns = {
            "within": "{distance:g} m",
            "labels": "{labels}",
            "found by float": "{found_float}",
            f"found by {other}": "{found_quantized}",
        }
        tables.append(record_table(found, columns))
    return "\n\n".join(tables)


def measure_tables(accuracy: Accuracy) -> tuple[Table, Table]:
    """`accuracy_text` as tables: all classes, then each class; one column per model."""
    names = [entry.model.capitalize() for entry in accuracy.models]
    measures, classes = list(_measures(accuracy)), _by_class(accuracy)
    title, heads = "Mean over distances, class by class", ("Class", "Labels", *names)
    return (
        plain_table("All classes", ("Measure", *names), measures, form="wide"),
        plain_table(title, heads, classes, form="wide"),
    )


def _measures(accuracy: Accuracy) -> Iterator[tuple[Cell, ...]]:
    entries = accuracy.models
    rows = [entry.metrics for entry in entries]
    yield ("mAP", *(with_interval(points(row.mean_ap), row.interval) for row in rows))
    if len(entries) > 1:
        yield (f"mAP less {entries[0].model}", *(_apart(entry.difference) for entry in entries))
    yield from _without_intervals(accuracy, ".3f")


def _apart(apart: Difference | None) -> Cell:
    """A difference of mean average precisions in points of 100, with its interval."""
    if apart is None or apart.mean_ap is None:
        return DASH
    return with_interval(f"{100 * apart.mean_ap:+.2f}", apart.interval, signed=True)


def _by_class(accuracy: Accuracy) -> list[tuple[str, ...]]:
    """Of each class with labels its name, how many, and every model's mean average precision."""
    return [
        (
            row.name,
            f"{row.labels:,}",
            *(points(entry.metrics.classes[index].mean_ap) for entry in accuracy.models),
        )
        for index, row in enumerate(accuracy.reference.classes)
        if row.labels
    ]


def model_tables(accuracy: Accuracy) -> tuple[Table, Table]:
    """Every model beside the first, then class by class; a model a row."""
    return _beside_first(accuracy), _classes_across(accuracy)


def _beside_first(accuracy: Accuracy) -> Table:
    first = accuracy.models[0].model
    reach = max(map(_reach, accuracy.models))
    scale = f"{-100 * reach:+.2f} to {100 * reach:+.2f}" if reach else ""
    columns = [Column("Model"), Column("mAP, of 100"), Column(f"Less {first}")]
    columns += [Column(scale, "bars", only="page"), Column(nds_title(accuracy))]
    rows = [
        Row(
            (
                entry.model,
                with_interval(points(entry.metrics.mean_ap), entry.metrics.interval),
                _apart(entry.difference),
                CellParts(bars=_bars(entry.difference, reach, first)),
                points(entry.metrics.nds),
            )
        )
        for entry in accuracy.models
    ]
    return Table(f"Every model beside {first}", columns, rows, "wide")


def _classes_across(accuracy: Accuracy) -> Table:
    labelled = [(i, row) for i, row in enumerate(accuracy.reference.classes) if row.labels]
    heads = ("AP of 100", *(f"{row.name} ({row.labels:,})" for _, row in labelled))
    rows = [
        (entry.model, *(points(entry.metrics.classes[i].mean_ap) for i, _ in labelled))
        for entry in accuracy.models
    ]
    title = "Average precision, class by class; labels in brackets"
    return plain_table(title, heads, rows, form="wide")


def _reach(entry: ModelAccuracy) -> float:
    """Largest distance from 0 of the difference or its interval."""
    apart = entry.difference
    if apart is None or apart.mean_ap is None:
        return 0.0
    ends = [apart.mean_ap]
    if apart.interval is not None:
        ends += [apart.interval.low, apart.interval.high]
    return max(abs(end) for end in ends)


def _bars(apart: Difference | None, reach: float, first: str) -> dict[str, Any] | None:
    """The interval of the difference on a line with 0 in the middle, the same for every model."""
    if apart is None or apart.mean_ap is None or not reach:
        return None

    def place(value: float) -> float:
        return _WIDE / 2 * (1 + value / reach)

    def block(kind: str, left: float, width: float, high: float) -> dict[str, Any]:
        top = (_HIGH - high) / 2
        return {"kind": kind, "left": left, "top": top, "width": width, "height": high}

    blocks = [block("zero", _WIDE / 2 - 0.15, 0.3, _HIGH)]
    if apart.interval is not None:
        low, high = place(apart.interval.low), place(apart.interval.high)
        blocks.append(block("span", low, high - low, 4.0))
    blocks.append(block("mark", place(apart.mean_ap) - 0.5, 1.0, 9.0))
    label = (
        f"Less {first} {100 * apart.mean_ap:+.2f} points, from {-100 * reach:.2f} to "
        f"{100 * reach:.2f}"
    )
    return {"height": _HIGH, "label": label, "blocks": blocks}
