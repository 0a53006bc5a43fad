"""Detection metrics from boxes alone: nuScenes' AP, errors and NDS, KITTI's BEV AP, intervals."""

from bevfusion_quant.metrics._bootstrap import (
    Bootstrap,
    Interval,
    interval_of_difference,
    interval_of_mean_ap,
)
from bevfusion_quant.metrics._evaluate import (
    Difference,
    compare_detections,
    evaluate_detections,
)
from bevfusion_quant.metrics._meter import DetectionMeter
from bevfusion_quant.metrics._result import ClassMetrics, DetectionMetrics, metrics_of
from bevfusion_quant.metrics._rules import ERRORS, DetectionRules

__all__ = [
    "ERRORS",
    "Bootstrap",
    "ClassMetrics",
    "DetectionMeter",
    "DetectionMetrics",
    "DetectionRules",
    "Difference",
    "Interval",
    "compare_detections",
    "evaluate_detections",
    "interval_of_difference",
    "interval_of_mean_ap",
    "metrics_of",
]
