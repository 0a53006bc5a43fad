"""Add what several calibrators have collected."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from ._calibrator_state import settings_of
from .calib._calibrator import Calibrator
from .calib._histogram_calibrator import HistogramCalibrator, combine
from .calib._max import MaxCalibrator

__all__ = ["merge"]


def merge(calibrators: Sequence[Calibrator]) -> Calibrator:
    """Return a new calibrator that has seen everything the given ones have.

    Counts are integers and bins of one width nest, so the order does not matter and nothing is
    rounded: the result equals one calibrator that watched all tensors, provided that all began
    with the same width. That is the largest value of the first tensor; `calibrate` agrees on it
    between processes.

    Args:
        calibrators: One or more of one class and settings; they are left as they are.

    Raises:
        ValueError: None given, other settings, or histograms of different widths.
        TypeError: A class of calibrator that cannot be merged.

    Examples:
        >>> import torch
        >>> from bevquant_quantizers import calib
        >>> parts = [calib.MaxCalibrator(8, None, False) for _ in range(2)]
        >>> parts[0].collect(torch.tensor([1.0]))
        >>> parts[1].collect(torch.tensor([-3.0]))
        >>> merge(parts).compute_amax()
        tensor(3.)
    """
    if not calibrators:
        raise ValueError("merge needs at least one calibrator")
    first = calibrators[0]
    settings = settings_of(first)
    for other in calibrators[1:]:
        if settings_of(other) != settings:
            raise ValueError(
                f"{first._who()}: calibrators of {settings} and of {settings_of(other)} cannot be "
                "merged"
            )
    merged = copy(first)
    if isinstance(merged, HistogramCalibrator):
        seen = [c for c in calibrators if isinstance(c, HistogramCalibrator) and c._rows]
        for i, part in enumerate(seen):
            if part._shape != seen[0]._shape:
                raise ValueError(
                    f"{first._who()}: histograms of shape {seen[0]._shape} and {part._shape} "
                    "cannot be merged"
                )
            pairs = zip(merged._rows, part._rows, strict=True)
            merged._rows = [combine(a, b) for a, b in pairs] if i else list(part._rows)
            merged._shape = part._shape
    elif isinstance(merged, MaxCalibrator):
        parts = [c for c in calibrators if isinstance(c, MaxCalibrator)]
        merged._amaxs = [amax for part in parts for amax in part._amaxs]
        merged._calib_amax = _largest([p._calib_amax for p in parts], first._who())
    return merged


def _largest(amaxs: Sequence[Tensor | None], who: str) -> Tensor | None:
    seen = [amax for amax in amaxs if amax is not None]
    if not seen:
        return None
    total = seen[0].clone()
    for amax in seen[1:]:
        if amax.shape != total.shape:
            raise ValueError(
                f"{who}: ranges of shape {tuple(total.shape)} and {tuple(amax.shape)} cannot be "
                "merged"
            )
        total = torch.maximum(total, amax.to(total))
    return total
