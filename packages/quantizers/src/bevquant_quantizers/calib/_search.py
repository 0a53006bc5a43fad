"""One entry to the searches of a range in a histogram."""

from __future__ import annotations

import operator
from numbers import Real

import numpy as np
import numpy.typing as npt

from ._entropy import entropy_amax
from ._mse import mse_amax

METHODS = ("max", "mse", "entropy", "percentile")


def search_amax(
    method: str,
    counts: npt.NDArray[np.int64],
    edges: npt.NDArray[np.float32],
    *,
    num_bits: int,
    unsigned: bool,
    stride: int = 1,
    start_bin: int = 128,
    percentile: float = 99.99,
    largest: float | None = None,
) -> float:
    """Return the range that `method` finds in a histogram of absolute values.

    Args:
        method: ``"mse"``, ``"entropy"``, ``"percentile"`` or ``"max"``.
        counts: int64 [bins].
        edges: float32 [bins + 1], ascending from 0 in equal steps.
        num_bits: Bits of the integer.
        unsigned: Whether the integers start at 0.
        stride: Step between candidates, in bins.
        start_bin: First candidate.
        percentile: Share of values to keep, 0…100.
        largest: The largest value counted; None takes the last edge.

    Returns:
        The range; 0.0 where the histogram holds nothing but zeros.

    Raises:
        TypeError: An unknown method.
        ValueError: A percentile outside 0…100, a stride below 1, a negative first bin.
    """
    if method not in METHODS:
        raise TypeError(
            f"Unknown calibration method {method!r}: use one of {', '.join(map(repr, METHODS))}"
        )
    if not isinstance(percentile, Real) or not 0 <= percentile <= 100:
        raise ValueError(
            f"Invalid percentile. Must be in range 0 <= percentile <= 100, got {percentile}."
        )
    try:
        wrong = operator.index(stride) < 1 or operator.index(start_bin) < 0
    except TypeError:
        wrong = True
    if wrong:
        raise ValueError(
            f"need integers stride >= 1 and start_bin >= 0, got {stride!r} and {start_bin!r}"
        )
    top = float(edges[-1]) if largest is None else largest
    # Without a candidate the largest value is left.
    if top == 0.0 or method == "max" or (method != "percentile" and start_bin >= len(counts)):
        return top
    stride = min(stride, len(counts))
    if method == "percentile":
        return percentile_amax(counts, edges, percentile)
    if method == "entropy":
        return entropy_amax(counts, edges, num_bits, unsigned, stride, start_bin)
    return mse_amax(counts, edges, num_bits, unsigned, stride, start_bin, top)


def percentile_amax(
    counts: npt.NDArray[np.int64], edges: npt.NDArray[np.float32], percentile: float
) -> float:
    """Return the lower edge of the first bin at which `percentile` of the values is reached.

    The edge that upstream returns. Where that is 0, because the first bin alone holds the share,
    the bin's upper edge is returned: a range of 0 would quantize everything to zero.

    Args:
        counts: int64 [bins], not all zero.
        edges: float32 [bins + 1].
        percentile: Share of values to keep, 0…100.

    Examples:
        >>> import numpy as np
        >>> percentile_amax(np.array([5, 4, 1]), np.array([0, 1, 2, 3], dtype=np.float32), 90.0)
        1.0
    """
    reached = np.cumsum(counts / counts.sum())
    return float(edges[max(int(np.searchsorted(reached, percentile / 100)), 1)])
