"""Detection metrics from boxes alone: nuScenes' AP, errors and NDS, KITTI's BEV AP, intervals."""

from bevfusion_quant.metrics._accuracy import Accuracy, AccuracyTally, ModelAccuracy, Sketch
from bevfusion_quant.metrics._bootstrap import (
    Bootstrap,
    Interval,
    interval_of_difference,
    interval_of_mean_ap,
)
from bevfusion_quant.metrics._curve import RECALLS
from bevfusion_quant.metrics._evaluate import (
    Difference,
    compare_detections,
    evaluate_detections,
)
from bevfusion_quant.metrics._meter import DetectionMeter
from bevfusion_quant.metrics._result import ClassMetrics, DetectionMetrics, metrics_of
from bevfusion_quant.metrics._rules import ERRORS, DetectionRules
from bevfusion_quant.metrics._text import (
    ERROR_UNITS,
    accuracy_notes,
    accuracy_text,
    nds_title,
    points,
    span,
)

__all__ = [
    "ERRORS",
    "ERROR_UNITS",
    "RECALLS",
    "Accuracy",
    "AccuracyTally",
    "Bootstrap",
    "ClassMetrics",
    "DetectionMeter",
    "DetectionMetrics",
    "DetectionRules",
    "Difference",
    "Interval",
    "ModelAccuracy",
    "Sketch",
    "accuracy_notes",
    "accuracy_text",
    "compare_detections",
    "evaluate_detections",
    "interval_of_difference",
    "interval_of_mean_ap",
    "metrics_of",
    "nds_title",
    "points",
    "span",
]
