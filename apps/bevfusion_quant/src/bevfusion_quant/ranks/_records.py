"""What was measured on one frame: named arrays, as bytes and back, nothing pickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bevquant_quantizers.documents import pack_arrays, read_arrays

__all__ = ["Record", "pack", "unpack"]

Record = Mapping[str, "np.ndarray[Any, Any]"]
"""Named arrays of numbers, booleans or text."""


def pack(record: Record) -> bytes:
    """The arrays as one .npz.

    Raises:
        ValueError: An array of Python objects.

    Example:
        >>> unpack(pack({"sums": np.array([0.1, 2.0])}))["sums"].tolist()
        [0.1, 2.0]
    """
    return pack_arrays(record)


def unpack(data: bytes) -> Record:
    """The arrays that `pack` wrote, bit for bit.

    Raises:
        ValueError: These are not such bytes.
    """
    return read_arrays(data, what="record")
