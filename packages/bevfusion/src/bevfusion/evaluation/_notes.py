"""Records of a frame that a process ran: name, size, labels, detections, findings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bev_data.points import Frame, Labels
from bevfusion.model.head import Detections
from bevquant_quantizers.documents import check_arrays, parse_json, plain
from bevquant_quantizers.ranks import Record

# A voxel has five values and an integer 127 magnitudes; a real frame has thousands of voxels.
_FEW_VOXELS = 26
_TOP_INTENSITY = 255.5
_VOXELS = "encoders.lidar"


@dataclass(frozen=True)
class PoorData:
    """One finding.

    Attributes:
        tensor: Path of the quantizer that observed it, or of the branch that reads it.
        frame: Name of the frame, or of several.
        kind: As `bevquant_quantizers.CalibrationFinding.kind`, or "few voxels" or "intensity".
        evidence: The observed values.
        remedy: What to do.
        poor: Whether the calibration cannot be right.
    """

    tensor: str
    frame: str
    kind: str
    evidence: str
    remedy: str
    poor: bool = True

    def __str__(self) -> str:
        return f"{self.tensor}, {self.frame}: {self.kind}: {self.evidence}; {self.remedy}"


def frame_findings(frame: Frame, voxels: int) -> tuple[PoorData, ...]:
    """Check the input of a LiDAR branch.

    Args:
        frame: Points, or voxels made elsewhere.
        voxels: Number of voxels.
    """
    found = []
    if voxels < _FEW_VOXELS:
        evidence = f"{len(frame):,} {'voxels' if frame.points is None else 'points'} "
        evidence += f"in {voxels} voxel{'s' * (voxels != 1)}"
        remedy = "calibrate with whole scans: are the points copies, or at the sensor itself?"
        found.append(PoorData(_VOXELS, frame.name, "few voxels", evidence, remedy))
    rows = frame.points if frame.points is not None else frame.voxels and frame.voxels.features
    intensity = np.zeros(0, np.float32) if rows is None else rows[:, 3]
    wrong = int((~((intensity >= 0) & (intensity <= _TOP_INTENSITY))).sum())
    if wrong:
        evidence = (
            f"{wrong:,} of {len(intensity):,} intensities lie outside 0..255, "
            f"from {intensity.min():.3g} to {intensity.max():.3g}"
        )
        remedy = "scale them to 0..255, and leave broken points out"
        found.append(PoorData(_VOXELS, frame.name, "intensity", evidence, remedy))
    return tuple(found)


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
    """Note about a frame: its name, number of points or voxels, labels, findings."""

    name: str
    size: int
    labels: Labels | None
    findings: tuple[PoorData, ...] = ()


def note_record(note: FrameNote) -> dict[str, np.ndarray[Any, Any]]:
    """The note as named arrays."""
    record = {"frame.name": np.array(note.name), "frame.size": np.array(note.size)}
    if note.findings:
        record["frame.findings"] = np.array(json.dumps(plain(note.findings)))
    if note.labels is not None:
        record["labels.boxes"] = note.labels.boxes
        record["labels.names"] = np.array(note.labels.names, np.str_)
        given = {name: getattr(note.labels, name) for name in _OPTIONAL}
        record |= {f"labels.{name}": array for name, array in given.items() if array is not None}
    return record


def note_of(record: Record) -> FrameNote:
    """The note of a record of `note_record`.

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
    findings_text = str(record.get("frame.findings", "[]"))
    findings: tuple[PoorData, ...] = parse_json(
        findings_text, tuple[PoorData, ...], what="list of findings"
    )
    return FrameNote(str(record["frame.name"]), int(record["frame.size"]), labels, findings)


def detections_record(who: str, found: Detections) -> dict[str, np.ndarray[Any, Any]]:
    """One model's detections as named arrays."""
    return {f"{who}.{name}": array for name, array in found._asdict().items()}


def detections_of(who: str, record: Record) -> Detections:
    """The detections of a record of `detections_record`.

    Raises:
        DocumentError: The record holds something else.
    """
    forms = {f"{who}.{name}": form for name, form in _DETECTION_FORMS.items()}
    check_arrays(record, forms, "record of a frame")
    return Detections(*(record[f"{who}.{name}"] for name in Detections._fields))
