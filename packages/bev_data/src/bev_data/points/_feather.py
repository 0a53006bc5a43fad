"""`.feather` files through pyarrow, the extra `feather`."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np

from bev_data.points._columns import Array
from bev_data.points._errors import PointsError


def read_feather(path: Path) -> dict[str, Array]:
    """Columns of numbers by name; a missing value is NaN.

    Raises:
        PointsError: pyarrow is not installed, or the file is damaged or of another kind.
    """
    try:
        feather = importlib.import_module("pyarrow.feather")
    except ImportError as error:
        raise PointsError(
            f"{path}: .feather files are read with pyarrow, which cannot be imported ({error}): "
            "pip install pyarrow, or the extra bev_data[feather]"
        ) from error
    try:
        table = feather.read_table(str(path), memory_map=False)
        table.validate(full=True)
        return {
            name: np.asarray(column.to_numpy())
            for name, column in zip(table.column_names, table.columns, strict=True)
        }
    except Exception as error:  # whatever pyarrow raises, it is no such file
        raise PointsError(
            f"{path}: cannot be read as .feather ({str(error).splitlines()[0][:200]}): it is "
            "damaged, cut short or something else"
        ) from error
