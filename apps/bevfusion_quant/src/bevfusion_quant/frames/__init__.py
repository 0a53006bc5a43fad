"""Frames as a run takes them: opened as the options say, as batches, with what is noted of each."""

from bevfusion_quant.frames._batches import FrameBatches, data_findings
from bevfusion_quant.frames._open import camera_names, frames_of
from bevfusion_quant.frames._poor_data import (
    FrameNote,
    PoorData,
    detections_of,
    detections_record,
    finding_lines,
    frame_findings,
    note_of,
    note_record,
    refuse_poor,
)

__all__ = [
    "FrameBatches",
    "FrameNote",
    "PoorData",
    "camera_names",
    "data_findings",
    "detections_of",
    "detections_record",
    "finding_lines",
    "frame_findings",
    "frames_of",
    "note_of",
    "note_record",
    "refuse_poor",
]
