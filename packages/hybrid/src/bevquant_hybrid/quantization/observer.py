"""Observers under their documented path."""

from __future__ import annotations

from bevquant_hybrid._observers._calib import CalibObserver
from bevquant_hybrid._observers._fixed import ClipObserver, FixedScaleObserver, NoopObserver
from bevquant_hybrid._observers._min_max import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)
from bevquant_hybrid._observers._search import KLObserver, MixObserver, MSEObserver
from bevquant_hybrid._observers._statistics import ClipStdObserver, PercentileObserver

MovingAveragePerTensorMinMaxObserver = MovingAverageMinMaxObserver  # as one page names it

__all__ = [
    "CalibObserver",
    "ClipObserver",
    "ClipStdObserver",
    "FixedScaleObserver",
    "KLObserver",
    "MSEObserver",
    "MinMaxObserver",
    "MixObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "MovingAveragePerTensorMinMaxObserver",
    "NoopObserver",
    "PerChannelMinMaxObserver",
    "PercentileObserver",
]
