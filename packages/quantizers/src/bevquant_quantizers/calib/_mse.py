"""The range of least squared quantization error, from a histogram."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bevquant_quantizers._fake_quant import fake_quantize
from bevquant_quantizers._format import Format, NumBits, format_of
from bevquant_quantizers._jit import has_numba
from bevquant_quantizers.calib._bounds import CHUNK, in_chunks

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Candidates whose float64 error is within this many units of rounding error of the least are
# scored again. On 40 histograms no float32 score strayed more than 2.8 units.
_ROUNDING_UNITS = 8.0
_LARGEST_SQUARED = 1e12


def mse_amax(
    counts: npt.NDArray[np.int64],
    edges: npt.NDArray[np.float32],
    num_bits: NumBits,
    unsigned: bool,
    stride: int,
    start_bin: int,
    largest: float,
    backend: str = "auto",
) -> float:
    r"""Return the candidate of least mean squared error between bin centres and their quantization.

    .. math:: \sum_j n_j (c_j - Q_a(c_j))^2, \quad Q_a(c) = \tfrac{a}{q_\max}
              \operatorname{clamp}(\operatorname{round}(c\, q_\max / a))

    Candidates a are the bin centres from `start_bin` on, and the largest value, which wins only by
    being better than all of them. The errors of all candidates are found in float64 from prefix
    sums; those that rounding cannot tell from the least are scored with upstream's own float32
    expression, the first least one wins: the result is upstream's, to the bit. Of FP8, Q is its
    rounding, and the errors are those in float64.

    Args:
        counts: int64 [bins], not all zero.
        edges: float32 [bins + 1], from 0 in equal steps.
        num_bits: Bits of the integer, or of FP8.
        unsigned: Whether the integers start at 0.
        stride: Step between candidates, in bins.
        start_bin: First candidate.
        largest: The largest value counted, above 0.
        backend: ``"numba"``, ``"numpy"``, or ``"auto"``: numba where it is installed.
    """
    form = format_of(num_bits, unsigned)
    if form.dtype is not None:
        return _float_amax(counts, edges, form, stride, start_bin, largest)
    steps = int(form.high)
    if steps < 1:
        return largest  # every range quantizes everything to zero
    if edges[-1] > _LARGEST_SQUARED:
        # float32 would overflow in sums of squares; a power of two scales without rounding.
        scale = 2.0 ** math.floor(math.log2(float(edges[-1])))
        scaled = (edges / scale).astype(np.float32)
        arguments = (num_bits, unsigned, stride, start_bin, largest / scale, backend)
        return scale * mse_amax(counts, scaled, *arguments)
    centers = torch.from_numpy(edges)
    centers = (centers[1:] + centers[:-1]) / 2
    wide = centers.numpy().astype(np.float64)
    tried = np.arange(start_bin, len(counts), stride)
    ranges = np.append(wide[tried], np.float64(np.float32(largest)))
    moments = _moments(counts, wide)
    if steps > len(counts):
        errors = _errors_per_bin(counts, wide, ranges, steps)
    else:
        errors = np.empty(len(ranges))
        errors[:-1] = _errors_of_centers(moments, ranges[:-1], steps, start_bin, stride, backend)
        errors[-1] = _error_of_range(moments, wide, ranges[-1], steps)
    # Rounding moves each quantized centre by about its own last bit, and squares add them up.
    energy = moments[2]
    errors = np.maximum(errors, 0.0)
    unit = np.sqrt(energy * errors) * 2.0**-24 + energy * 2.0**-48 + errors * 2.0**-22
    slack = _ROUNDING_UNITS * unit
    close = np.flatnonzero(errors - slack <= (errors + slack).min())
    amaxes = torch.from_numpy(ranges[close].astype(np.float32))
    if len(close) == 1:
        return float(amaxes[0])
    scores = _upstream_scores(centers, torch.from_numpy(counts), amaxes, num_bits, unsigned)
    return float(amaxes[int(np.argmin(scores))])


def _float_amax(
    counts: Ints,
    edges: npt.NDArray[np.float32],
    form: Format,
    stride: int,
    start: int,
    largest: float,
) -> float:
    r"""Return the range of least error for numbers v_k in unequal steps.

    With b_k the first bin beyond the middle of v_{k−1} and v_k, and P0, P1, T0, T1 as below,

    .. math:: \sum n c^2 - 2 s \sum_k (v_k - v_{k-1}) (T_1 - P_1[b_k])
              + s^2 \sum_k (v_k^2 - v_{k-1}^2) (T_0 - P_0[b_k])
    """
    centers = ((edges[1:] + edges[:-1]) / 2).astype(np.float64)
    ranges = np.append(centers[start::stride], np.float64(np.float32(largest)))
    p0, p1, energy = _moments(counts, centers)
    levels, errors = form.levels, np.empty(len(ranges))
    middles, steps, squares = (levels[1:] + levels[:-1]) / 2, np.diff(levels), np.diff(levels**2)
    rows = max(CHUNK // len(levels), 1)
    for first in range(0, len(ranges), rows):
        part = slice(first, first + rows)
        s = ranges[part] / form.high
        bounds = np.searchsorted(centers, middles * s[:, None])
        cross, square = (p1[-1] - p1[bounds]) @ steps, (p0[-1] - p0[bounds]) @ squares
        errors[part] = energy - 2.0 * s * cross + s * s * square
    return float(ranges[int(np.argmin(errors))])


def _upstream_scores(
    centers: Tensor, counts: Tensor, amaxes: Tensor, num_bits: NumBits, unsigned: bool
) -> list[float]:
    weights = counts.to(torch.float32)
    scores = []
    for amax in amaxes:
        quantized = fake_quantize(centers, amax, num_bits, unsigned)
        scores.append(float(((quantized - centers) ** 2 * weights).mean()))
    return scores


def _moments(counts: Ints, centers: Floats) -> tuple[Floats, Floats, float]:
    """Prefix sums of n and n·c, a zero first, and the sum of n·c²."""
    first = counts * centers
    zeroth_sums, first_sums = np.zeros((2, len(counts) + 1))
    np.cumsum(counts, out=zeroth_sums[1:])
    np.cumsum(first, out=first_sums[1:])
    return zeroth_sums, first_sums, float(first @ centers)


# With b_k the first bin that rounds to k or more, K the largest integer and s the step:
#   sum n (c - k s)^2 = sum n c^2 - 2 s (K T1 - sum_k P1[b_k]) + s^2 (K^2 T0 - sum_k (2k-1) P0[b_k])
# where P0 and P1 are prefix sums of n and n c, and T0 and T1 their totals.


def _errors_of_centers(
    moments: tuple[Floats, Floats, float],
    ranges: Floats,
    steps: int,
    start_bin: int,
    stride: int,
    backend: str,
) -> Floats:
    p0, p1, _energy = moments
    if not len(ranges):
        return np.empty(0)
    by_count, by_value = np.empty((2, len(ranges)))
    if backend == "numba" or (backend == "auto" and has_numba()):
        from ._sums_numba import level_sums

        centers = 2.0 * (start_bin + stride * np.arange(len(ranges))) + 1.0
        level_sums(p0, p1, centers, steps, by_count, by_value)
    else:
        for rows, bounds in in_chunks(_bounds, start_bin, len(ranges), stride, steps):
            by_count[rows], by_value[rows] = _level_sums(p0, p1, bounds)
    return _combine(moments, ranges / steps, steps, by_count, by_value)


def _bounds(first: int, number: int, stride: int, steps: int) -> npt.NDArray[np.int32]:
    """First bin of each level for each candidate: it depends on the bins' numbers alone."""
    odd = 2.0 * np.arange(steps) + 1.0
    bins = 2.0 * (first + stride * np.arange(number)) + 1.0
    return (odd * (bins / (4.0 * steps))[:, None] + 0.5).astype(np.int32)


def _level_sums(p0: Floats, p1: Floats, bounds: npt.NDArray[np.int32]) -> tuple[Floats, Floats]:
    odd = 2.0 * np.arange(bounds.shape[-1]) + 1.0
    return p0.take(bounds) @ odd, p1.take(bounds).sum(-1)


def _error_of_range(
    moments: tuple[Floats, Floats, float], centers: Floats, amax: float, steps: int
) -> float:
    thresholds = (np.arange(steps) + 0.5) * (amax / steps)
    bounds = np.searchsorted(centers, thresholds).astype(np.int32)
    by_count, by_value = _level_sums(moments[0], moments[1], bounds)
    return float(_combine(moments, np.float64(amax / steps), steps, by_count, by_value))


def _combine(
    moments: tuple[Floats, Floats, float],
    step: Floats | np.float64,
    steps: int,
    by_count: Floats,
    by_value: Floats,
) -> Floats:
    p0, p1, energy = moments
    cross = steps * p1[-1] - by_value
    squares = float(steps) ** 2 * p0[-1] - by_count
    errors: Floats = energy - 2.0 * step * cross + step * step * squares
    return errors


def _errors_per_bin(counts: Ints, centers: Floats, ranges: Floats, steps: int) -> Floats:
    """Errors by quantizing every centre: for more levels than bins."""
    errors = np.empty(len(ranges))
    rows = max(CHUNK // len(centers), 1)
    for start in range(0, len(ranges), rows):
        step = ranges[start : start + rows, None] / steps
        quantized = np.minimum(np.rint(centers / step), steps) * step
        errors[start : start + rows] = (quantized - centers) ** 2 @ counts.astype(np.float64)
    return errors
