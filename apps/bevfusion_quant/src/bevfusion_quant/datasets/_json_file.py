"""JSON files with calibration in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bevfusion_quant._errors import InputError

__all__ = ["matrix", "read_json"]


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        InputError: missing, unreadable, no JSON, or another value than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; the calibration is missing") from error
    except (OSError, ValueError) as error:  # a JSONDecodeError is a ValueError
        raise InputError(f"{path}: not readable JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: a JSON object is expected, not a {type(value).__name__}")
    return value


def matrix(
    value: object, rows: int | None, columns: int | None, what: str
) -> npt.NDArray[np.float64]:
    """Nested lists of numbers as float64 [rows, columns]; null becomes NaN, None leaves a size open.

    Raises:
        InputError: other values or another shape.
    """  # noqa: E501
    wanted = ", ".join("N" if size is None else str(size) for size in (rows, columns))
    try:
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} must be numbers [{wanted}]: {error}") from error
    if array.size == 0 and rows is None and columns is not None:
        return np.zeros((0, columns))
    fits = array.ndim == 2 and all(
        size in (None, got) for size, got in zip((rows, columns), array.shape, strict=True)
    )
    if not fits:
        raise InputError(f"{what} must be numbers [{wanted}], not {list(array.shape)}")
    return array
