"""What was measured on one frame: named arrays, as bytes and back, nothing pickled."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

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
    objects = [name for name, array in record.items() if np.asarray(array).dtype.hasobject]
    if objects:
        raise ValueError(f"{', '.join(objects)}: a record holds numbers and text, not objects")
    buffer = io.BytesIO()
    np.savez(buffer, **dict(record))  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack(data: bytes) -> Record:
    """The arrays that `pack` wrote, bit for bit.

    Raises:
        ValueError: These are not such bytes.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"not a record: {error}") from error
