"""Calibrators and weight calibration, under the names of ``pytorch_quantization.calib``."""

from __future__ import annotations

from ._entropy import entropy_amax
from ._histogram_calibrator import HistogramCalibrator
from ._max import MaxCalibrator
from ._mse import mse_amax
from ._search import METHODS, calibrate_weights, percentile_amax, search_amax

__all__ = [
    "METHODS",
    "HistogramCalibrator",
    "MaxCalibrator",
    "calibrate_weights",
    "entropy_amax",
    "mse_amax",
    "percentile_amax",
    "search_amax",
]
