"""Metrics as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bev_data.tables import Cell, CellParts, aligned_table
from bevquant_quantizers.documents import record_table

if TYPE_CHECKING:
    from bev_data.metrics._accuracy import Accuracy
    from bev_data.metrics._agreement import AgreementRow, FoundRow
    from bev_data.metrics._bootstrap import Interval
    from bev_data.metrics._evaluate import Difference

ERROR_UNITS = {"ATE": "m", "ASE": "1 − IoU", "AOE": "rad", "AVE": "m/s"}
DASH = "–"


def accuracy_text(accuracy: Accuracy) -> str:
    """Headline figures model by model, average precision class by class, and what to know."""
    names = [entry.model for entry in accuracy.models]
    head = ("of 100", *names)
    classes = [row for row in accuracy.reference.classes if row.labels]
    by_class = [
        (
            row.name,
            f"{row.labels:,}",
            *(points(entry.metrics.classes[_place(accuracy, row.name)].mean_ap)
              for entry in accuracy.models),
        )
        for row in classes
    ]  # fmt: skip
    return "\n\n".join(
        (
            aligned_table(head, list(_headline(accuracy))),
            aligned_table(("class, AP of 100", "labels", *names), by_class),
            "\n".join(accuracy_notes(accuracy)),
        )
    )


def accuracy_notes(accuracy: Accuracy) -> Iterator[str]:
    """What the figures are of, one sentence a line."""
    reference = accuracy.reference
    others = f", {accuracy.unlabelled} more without labels" if accuracy.unlabelled else ""
    objects, frames = (
        _many(n, what)
        for n, what in ((reference.labels, "labelled object"), (reference.frames, "frame"))
    )
    yield f"{objects} in {frames}{others}."
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
        yield f"No labels of {', '.join(reference.absent)}: {how}."
    reasons = {"AVE": "velocities are not labelled", "AAE": "boxes have no attributes"}
    told = [f"{name} ({reasons[name]})" for name in reference.missing if name in reasons]
    if told and reference.mean_ap is not None:
        yield f"NDS is without {' and '.join(told)}, so not comparable with nuScenes' tables."


def nds_title(accuracy: Accuracy) -> str:
    """NDS, and what it is without."""
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


def mean_ap_apart(apart: Difference | None) -> Cell:
    """A difference of mean average precisions in points of 100, with its interval."""
    if apart is None or apart.mean_ap is None:
        return "–"
    return with_interval(f"{100 * apart.mean_ap:+.2f}", apart.interval, signed=True)


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
    for distance in accuracy.rules.distances:
        yield (f"AP, {distance:g} m", *(points(row.average_precision[distance]) for row in rows))
    yield (nds_title(accuracy), *(points(row.nds) for row in rows))
    for error, unit in ERROR_UNITS.items():
        values = [row.errors[error] for row in rows]
        yield (f"{error}, {unit}", *(or_dash(v, ".4f") for v in values))
    for overlap in accuracy.rules.overlaps:
        yield (f"BEV AP, IoU {overlap:g}", *(points(row.bev_ap[overlap]) for row in rows))


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _place(accuracy: Accuracy, name: str) -> int:
    return accuracy.classes.index(name)


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


def or_dash(value: float | None, form: str) -> str:
    """A number in the given form, a dash for None."""
    return DASH if value is None else format(value, form)
