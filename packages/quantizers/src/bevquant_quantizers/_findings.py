"""Calibrations that cannot be right: which tensor, which batch, why, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ._abs_histogram import AbsHistogram
from ._format import Format, NumBits, format_of
from .calib._calibrator import Calibrator
from .calib._histogram_calibrator import HistogramCalibrator

Kind = Literal[
    "no values", "all zero", "constant", "few values", "few distinct", "outliers", "float16",
    "method", "channels",
]  # fmt: skip

# With fewer different magnitudes than this the bins say nothing of how values are spread.
_FEW_DISTINCT = 8
# A range this many times what all but 2 in 100 values reach leaves them 127 / 64, two integers.
_OUTLYING = 64.0
_CROWD = 0.98
_LARGEST_FLOAT16 = 65504.0
_METHOD_DB = 6.0


@dataclass(frozen=True)
class CalibrationFinding:
    """A defect of a calibration, or a fact to know before its use.

    Attributes:
        tensor: Path of the quantizer.
        frame: Number of the batch with the defect, from 0; None where all batches have it.
        kind: ``"no values"``: the quantizer saw none. ``"all zero"``: only zeros. ``"constant"``:
            one magnitude everywhere. ``"few values"``: fewer values than integers. ``"few
            distinct"``: many values of very few magnitudes. ``"outliers"``: very few values set the
            range, and all others share two integers. ``"float16"``: the range exceeds the largest
            float16. ``"method"``: another method keeps much more of this tensor. ``"channels"``:
            the channels' ranges differ so much that one range erases some, or they have ranges of
            their own for that reason.
        evidence: Values that show it.
        remedy: What to do.
        poor: Whether the calibration cannot be right.
    """

    tensor: str
    frame: int | None
    kind: Kind
    evidence: str
    remedy: str
    poor: bool = True

    def __str__(self) -> str:
        place = "" if self.frame is None else f", batch {self.frame}"
        return f"{self.tensor}{place}: {self.kind}: {self.evidence}; {self.remedy}"


def find(
    tensor: str, calibrator: Calibrator, found: Tensor | None, method: str
) -> tuple[CalibrationFinding, ...]:
    """Check the values that one calibrator collected, and the range found in them."""
    rows = calibrator._rows if isinstance(calibrator, HistogramCalibrator) else []
    every = [*_range(rows, found)]
    if rows and found is not None and bool(found.any()):
        ranges = found.detach().float().cpu().reshape(-1).tolist()
        form = format_of(calibrator._num_bits, calibrator._unsigned)
        if not form.block:
            every += _spread(rows, ranges, form)
            every += _method(rows, calibrator, ranges, method)
    if tensor.endswith("_weight_quantizer") and found is not None and not bool(found.any()):
        # A layer that starts at zero, as the offsets of deformable convolutions, is exact.
        remedy = "load trained weights, unless the layer is meant to add nothing"
        return (CalibrationFinding(tensor, None, "all zero", "all weights are 0", remedy, False),)
    return tuple(
        CalibrationFinding(tensor, frame, kind, why, what, kind != "method")
        for kind, why, what, frame in every
    )


_Found = Iterator[tuple[Kind, str, str, int | None]]


def _range(rows: Sequence[AbsHistogram], found: Tensor | None) -> _Found:
    if found is None:
        remedy = "run batches that reach it, or disable it"
        yield "no values", "not one value reached it", remedy, None
    elif not bool(found.any()):
        number = f"{sum(row.values for row in rows):,} values" if rows else "values"
        yield "all zero", f"all {number} were zero", "calibrate with data that reach it", None
    elif float(found.max()) > _LARGEST_FLOAT16:
        evidence = f"the range is {float(found.max()):.3g}, and float16 ends at 65,504"
        remedy = "look for broken values, and leave them out"
        yield "float16", evidence, remedy, _peak(max(rows, key=_largest)) if rows else None


def _spread(rows: Sequence[AbsHistogram], ranges: Sequence[float], form: Format) -> _Found:
    """Distribution of the values, from the histograms of all channels together."""
    more = "calibrate with more, and more varied, data"
    values = sum(row.values for row in rows)
    magnitudes = 2 ** (form.bits - 1) if form.dtype is None else len(form.levels)
    if values < magnitudes:
        kind = "integers have" if form.dtype is None else f"{form.name} has"
        evidence = f"{values} values, and {kind} {magnitudes} magnitudes"
        yield "few values", evidence, more, None
        return
    outlying = max(zip(rows, ranges, strict=True), key=lambda pair: _outlying(*pair))
    if form.dtype is None and _outlying(*outlying) > _OUTLYING:  # FP8 is as fine for small values
        row, limit = outlying
        usual = _crowd(row)
        few = int(row.counts.numpy()[_starts(row) >= usual].sum())
        evidence = (
            f"{few:,} of {row.values - row.zeros:,} values other than zero made the range "
            f"{limit:.4g}; {_CROWD:.0%} of them lie below {usual:.4g} and get two integers"
        )
        yield "outliers", evidence, "leave the broken values out of the data", _peak(row)
        return
    distinct = max(_distinct(row) for row in rows)
    if distinct == 1:
        evidence = f"all {values:,} values have one magnitude, {max(map(_largest, rows)):.4g}"
        yield "constant", evidence, more, None
    # A mask of zeros and ones is what it is; its two integers are exact.
    elif distinct < _FEW_DISTINCT and not (distinct == 2 and any(row.zeros for row in rows)):
        yield "few distinct", f"{values:,} values have {distinct} magnitudes", more, None


def _method(
    rows: Sequence[AbsHistogram], calibrator: Calibrator, ranges: Sequence[float], method: str
) -> _Found:
    best = None if method == "mse" else calibrator.compute_amax("mse")
    if best is None:
        return
    bits, unsigned = calibrator._num_bits, calibrator._unsigned
    theirs = expected_sqnr(rows, best.float().cpu().reshape(-1).tolist(), bits, unsigned)
    ours = expected_sqnr(rows, ranges, bits, unsigned)
    if theirs - ours > _METHOD_DB:
        evidence = f"{method!r} keeps {ours:.1f} dB of the calibration data, 'mse' {theirs:.1f} dB"
        yield "method", evidence, "calibrate with method='mse'", None


def expected_sqnr(
    rows: Sequence[AbsHistogram], ranges: Sequence[float], num_bits: NumBits, unsigned: bool
) -> float:
    r"""Signal to quantization noise of values that lie at the centres of their bins, in dB.

    .. math:: 10 \log_{10} \frac{\sum_j n_j c_j^2}{\sum_j n_j (c_j - Q_a(c_j))^2}

    with Q_a as `fake_quantize` rounds and clamps. Zeros are exact and count for nothing; the ratio
    is infinite where nothing is lost.
    """
    form = format_of(num_bits, unsigned)
    signal = noise = 0.0
    for row, amax in zip(rows, ranges, strict=True):
        counts, centers = _nonzero(row), _starts(row) + bin_width(row) / 2
        step = amax / form.high
        exact = np.zeros_like(centers)
        if step:
            exact = form.rounded(torch.from_numpy(centers / step)).numpy() * step
        signal += float(counts @ centers**2)
        noise += float(counts @ (exact - centers) ** 2)
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else 0.0


def _nonzero(row: AbsHistogram) -> npt.NDArray[np.int64]:
    """The counts without the zeros, whether the calibrator kept these or not."""
    counts = row.counts.numpy().copy()
    counts[0] -= counts.sum() - (row.values - row.zeros)
    return counts


def bin_width(row: AbsHistogram) -> float:
    """Width of a histogram's bins."""
    return row.upper / row.bins * 2.0**row.shift


def reach(row: AbsHistogram, number: float) -> float:
    """Upper edge of the `number` smallest nonzero values; 0 for none."""
    counts = np.cumsum(_nonzero(row))
    if not counts[-1]:
        return 0.0
    return min((int(np.searchsorted(counts, number)) + 1) * bin_width(row), row.max)


def _starts(row: AbsHistogram) -> npt.NDArray[np.float64]:
    return np.arange(row.counts.numel(), dtype=np.float64) * np.float64(bin_width(row))


def _largest(row: AbsHistogram) -> float:
    return row.max


def _peak(row: AbsHistogram) -> int | None:
    """The batch of the largest value, where it is known."""
    return None if row.peak < 0 else row.peak


def _crowd(row: AbsHistogram) -> float:
    return reach(row, _CROWD * (row.values - row.zeros))


def _outlying(row: AbsHistogram, limit: float) -> float:
    """Ratio of the range to the largest of nearly all values."""
    usual = _crowd(row)
    return limit / usual if usual else 0.0


def _distinct(row: AbsHistogram) -> int:
    """How many magnitudes there are at least; many where the first bin may hold any number."""
    counts = _nonzero(row)
    if counts[0]:
        return _FEW_DISTINCT
    return int(np.count_nonzero(counts)) + bool(row.zeros)
