"""JSON files with calibration in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bev_data._errors import InputError
from bevquant_quantizers.documents import DocumentError
from bevquant_quantizers.documents import read_json as read_json_file


def read_json(path: Path, form: Any = dict[str, Any]) -> Any:
    """The object that a JSON file holds, of a form as `documents.parse_json` takes it.

    Raises:
        InputError: missing, unreadable, no JSON, or another value than an object.
    """
    try:
        return read_json_file(path, form)
    except DocumentError as error:
        raise InputError(str(error)) from error


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
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"{what} must be numbers [{wanted}]: {error}") from error
    if array.size == 0 and rows is None and columns is not None:
        return np.zeros((0, columns))
    fits = array.ndim == 2 and all(
        size in (None, got) for size, got in zip((rows, columns), array.shape, strict=True)
    )
    if not fits:
        raise InputError(f"{what} must be numbers [{wanted}], not {list(array.shape)}")
    return array
