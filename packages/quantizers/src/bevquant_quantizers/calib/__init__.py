"""Calibrators and weight calibration, under the names of ``pytorch_quantization.calib``."""

from __future__ import annotations

from ._histogram_calibrator import HistogramCalibrator
from ._max import MaxCalibrator
from ._search import METHODS
from ._weights import calibrate_weights

__all__ = ["METHODS", "HistogramCalibrator", "MaxCalibrator", "calibrate_weights"]
