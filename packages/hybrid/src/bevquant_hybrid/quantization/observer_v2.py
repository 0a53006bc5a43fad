"""The same observers under the newer documented path."""

from __future__ import annotations

from bevquant_hybrid.quantization.observer import (
    ClipObserver,
    ClipStdObserver,
    FixedScaleObserver,
    KLObserver,
    MinMaxObserver,
    MixObserver,
    MSEObserver,
    PercentileObserver,
)

__all__ = [
    "ClipObserver",
    "ClipStdObserver",
    "FixedScaleObserver",
    "KLObserver",
    "MSEObserver",
    "MinMaxObserver",
    "MixObserver",
    "PercentileObserver",
]
