"""Models on frames: batches, what is known of each frame, detections counted against labels.

Of the processes that a launcher started each runs its share of the frames, and all get the figures
of one, bit for bit (`bevquant_quantizers.ranks`).
"""

from bevfusion.evaluation._batches import FrameBatches, data_findings
from bevfusion.evaluation._notes import (
    FrameNote,
    PoorData,
    detections_of,
    detections_record,
    frame_findings,
    note_of,
    note_record,
)
from bevfusion.evaluation._tally import (
    ModelTallies,
    accuracy_tally,
    detection_rules,
    detection_tally,
    judge_detector,
    judged_text,
    tally_models,
)

__all__ = [
    "FrameBatches",
    "FrameNote",
    "ModelTallies",
    "PoorData",
    "accuracy_tally",
    "data_findings",
    "detection_rules",
    "detection_tally",
    "detections_of",
    "detections_record",
    "frame_findings",
    "judge_detector",
    "judged_text",
    "note_of",
    "note_record",
    "tally_models",
]
