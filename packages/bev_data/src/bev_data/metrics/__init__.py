"""Detection metrics from boxes alone: nuScenes' AP, errors and NDS, KITTI's BEV AP, intervals."""

from bev_data.metrics._accumulator import DetectionAccumulator
from bev_data.metrics._agreement import AgreementAccumulator, AgreementRow, FoundRow, match
from bev_data.metrics._bootstrap import (
    Bootstrap,
    Interval,
    drawn_mean_ap,
    interval_of_difference,
    interval_of_mean_ap,
)
from bev_data.metrics._curve import RECALLS
from bev_data.metrics._evaluate import (
    Accuracy,
    AccuracyAccumulator,
    AccuracySummary,
    Difference,
    DifferenceSummary,
    ModelAccuracy,
    ModelSummary,
    Sketch,
    compare_detections,
    evaluate_detections,
)
from bev_data.metrics._result import ClassMetrics, DetectionMetrics, metrics_of
from bev_data.metrics._rules import ERRORS, DetectionRules
from bev_data.metrics._text import (
    ERROR_UNITS,
    accuracy_notes,
    accuracy_text,
    agreement_text,
    measure_tables,
    model_tables,
    nds_title,
    points,
    span,
    with_interval,
)
from bev_data.tables import aligned_table, or_dash
from bevquant_quantizers.documents import record_table

__all__ = [
    "ERRORS",
    "ERROR_UNITS",
    "RECALLS",
    "Accuracy",
    "AccuracyAccumulator",
    "AccuracySummary",
    "AgreementAccumulator",
    "AgreementRow",
    "Bootstrap",
    "ClassMetrics",
    "DetectionAccumulator",
    "DetectionMetrics",
    "DetectionRules",
    "Difference",
    "DifferenceSummary",
    "FoundRow",
    "Interval",
    "ModelAccuracy",
    "ModelSummary",
    "Sketch",
    "accuracy_notes",
    "accuracy_text",
    "agreement_text",
    "aligned_table",
    "compare_detections",
    "drawn_mean_ap",
    "evaluate_detections",
    "interval_of_difference",
    "interval_of_mean_ap",
    "match",
    "measure_tables",
    "metrics_of",
    "model_tables",
    "nds_title",
    "or_dash",
    "points",
    "record_table",
    "span",
    "with_interval",
]

# Their former names.
AccuracyTally, DetectionTally = AccuracyAccumulator, AgreementAccumulator
DetectionMeter = DetectionAccumulator
