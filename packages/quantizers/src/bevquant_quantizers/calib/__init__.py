"""Calibrators and weight calibration, under the names of ``pytorch_quantization.calib``."""

from __future__ import annotations

from ._histogram_calibrator import HistogramCalibrator
from ._max import MaxCalibrator

__all__ = ["HistogramCalibrator", "MaxCalibrator"]
