"""Models on frames: batches, notes about each frame, detections against labels.

Each process of a launcher runs its share of the frames. All get the figures of a single process,
bit for bit (`bevquant_quantizers.ranks`).
"""

from bevfusion.evaluation._accumulate import (
    ModelAccumulators,
    accumulate_models,
    accuracy_accumulator,
    agreement_accumulator,
    detection_rules,
    evaluate_detector,
    evaluation_text,
)
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

__all__ = [
    "FrameBatches",
    "FrameNote",
    "ModelAccumulators",
    "PoorData",
    "accumulate_models",
    "accuracy_accumulator",
    "agreement_accumulator",
    "data_findings",
    "detection_rules",
    "detections_of",
    "detections_record",
    "evaluate_detector",
    "evaluation_text",
    "frame_findings",
    "note_of",
    "note_record",
]

# Their former names.
ModelTallies, tally_models = ModelAccumulators, accumulate_models
accuracy_tally, detection_tally = accuracy_accumulator, agreement_accumulator
judge_detector, judged_text = evaluate_detector, evaluation_text
