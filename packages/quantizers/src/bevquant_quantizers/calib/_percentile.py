"""The range below which a share of the values lies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["percentile_amax"]


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
