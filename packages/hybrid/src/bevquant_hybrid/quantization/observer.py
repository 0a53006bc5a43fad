"""Observers under their documented path."""

from __future__ import annotations

from bevquant_hybrid._observers._min_max import (
    CalibObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)
from bevquant_hybrid._observers._range import ClipObserver, FixedScaleObserver, NoopObserver
from bevquant_hybrid._observers._search import (
    ClipStdObserver,
    KLObserver,
    MixObserver,
    MSEObserver,
    PercentileObserver,
)

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
