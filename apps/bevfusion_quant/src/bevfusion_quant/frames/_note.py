"""A frame's name, labels and detections as arrays, so that they can travel and be kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bev_data.points import Labels
from bevfusion.model.head import Detections
from bevfusion_quant.frames._poor_data import PoorData, from_text, to_text
from bevquant_quantizers.documents import check_arrays

if TYPE_CHECKING:
    from bevfusion_quant.ranks import Record

__all__ = ["FrameNote", "detections_of", "detections_record", "note_of", "note_record"]

_OPTIONAL = ("velocities", "visibility", "num_points")
_Forms = dict[str, tuple[Any, tuple[int | str, ...]]]
_FORMS: _Forms = {"frame.name": ("U", ()), "frame.size": ("iu", ())}
_LABEL_FORMS: _Forms = {"labels.boxes": ("f", ("objects", 7)), "labels.names": ("U", ("objects",))}
_OPTIONAL_FORMS: _Forms = {
    "frame.findings": ("U", ()),
    "labels.velocities": ("f", ("objects", 2)),
    "labels.visibility": ("f", ("objects",)),
    "labels.num_points": ("iu", ("objects",)),
}
_DETECTION_FORMS: _Forms = {
    "boxes": ("f", ("found", 7)),
    "scores": ("f", ("found",)),
    "labels": ("iu", ("found",)),
    "velocities": ("f", ("found", 2)),
}


class FrameNote(NamedTuple):
    """What is kept of a frame: its name, number of points or voxels, labels, what is wrong."""

    name: str
    size: int
    labels: Labels | None
    findings: tuple[PoorData, ...] = ()


def note_record(note: FrameNote) -> dict[str, np.ndarray[Any, Any]]:
    """The note as named arrays."""
    record = {"frame.name": np.array(note.name), "frame.size": np.array(note.size)}
    if note.findings:
        record["frame.findings"] = np.array(to_text(note.findings))
    if note.labels is not None:
        record["labels.boxes"] = note.labels.boxes
        record["labels.names"] = np.array(note.labels.names, np.str_)
        given = {name: getattr(note.labels, name) for name in _OPTIONAL}
        record |= {f"labels.{name}": array for name, array in given.items() if array is not None}
    return record


def note_of(record: Record) -> FrameNote:
    """The note that `note_record` wrote.

    Raises:
        DocumentError: The record holds something else.
    """
    optional = {name: form for name, form in _OPTIONAL_FORMS.items() if name in record}
    labelled = _LABEL_FORMS if "labels.boxes" in record else {}
    check_arrays(record, {**_FORMS, **labelled, **optional}, "record of a frame")
    labels = None
    if labelled:
        names = tuple(str(name) for name in record["labels.names"])
        rest = (record.get(f"labels.{name}") for name in _OPTIONAL)
        labels = Labels(record["labels.boxes"], names, *rest)
    findings = from_text(str(record.get("frame.findings", "[]")))
    return FrameNote(str(record["frame.name"]), int(record["frame.size"]), labels, findings)


def detections_record(who: str, found: Detections) -> dict[str, np.ndarray[Any, Any]]:
    """One model's detections as named arrays."""
    return {f"{who}.{name}": array for name, array in found._asdict().items()}


def detections_of(who: str, record: Record) -> Detections:
    """The detections that `detections_record` wrote.

    Raises:
        DocumentError: The record holds something else.
    """
    forms = {f"{who}.{name}": form for name, form in _DETECTION_FORMS.items()}
    check_arrays(record, forms, "record of a frame")
    return Detections(*(record[f"{who}.{name}"] for name in Detections._fields))
