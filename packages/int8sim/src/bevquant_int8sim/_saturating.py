"""Operands at which wrong integer arithmetic shows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def saturating_operands(
    rows: int, depth: int, columns: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """``[rows, depth]`` and ``[depth, columns]`` of nothing but −128 and 127.

    Some rows and columns are constant, the others alternate with every period up to their number.
    """

    def pattern(lines: int) -> npt.NDArray[np.int8]:
        line, place = np.arange(lines)[:, None], np.arange(depth)[None, :]
        low = (place // (line // 2 + 1)) % 2 == line % 2
        low[0], low[1 % lines] = True, False
        return np.where(low, -128, 127).astype(np.int8)

    return pattern(rows), np.ascontiguousarray(pattern(columns).T)
