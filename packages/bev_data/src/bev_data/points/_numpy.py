"""`.npz` archives and `.npy` arrays; nothing is ever unpickled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bev_data.points._columns import NAMES, Array, Content
from bev_data.points._errors import PointsError
from bev_data.points._frame import Labels
from bevquant_quantizers.documents import DocumentError, read_arrays


def read_npz(path: Path, key: str, names: tuple[str, ...]) -> tuple[Content, Labels | None]:
    """Points and labels of a `.npz` file.

    Points are the array `key`; without it, the arrays x, y, z and so on of one column each. Arrays
    `boxes` [M, 7] and `names` [M], if both are there, become labels.

    Args:
        path: the file.
        key: name of the array of points.
        names: further names of columns.

    Raises:
        PointsError: not a zip archive, no such arrays, pickled objects, or labels of another shape.
    """
    columns = dict.fromkeys((*NAMES, *names))
    try:
        arrays = read_arrays(path, (), optional=(key, "boxes", "names", *columns))
    except DocumentError as error:
        raise PointsError(str(error)) from error
    if key not in arrays and any(name not in arrays for name in "xyz"):
        try:
            read_arrays(path, (key,))  # says what there is
        except DocumentError as error:
            raise PointsError(f"{error}: save the points under {key!r} or say key=") from error
    labels = _labels(path, arrays) if "boxes" in arrays and "names" in arrays else None
    content: Content = {name: arrays[name] for name in columns if name in arrays}
    return arrays.get(key, content), labels


def _labels(path: Path, arrays: Mapping[str, Array]) -> Labels:
    boxes, names = arrays["boxes"], arrays["names"]
    fits = boxes.ndim == 2 and boxes.shape[1] == 7 and names.shape == (len(boxes),)
    if not fits or boxes.dtype.kind not in "iuf":
        raise PointsError(
            f"{path}: boxes {list(boxes.shape)} and names {list(names.shape)}; "
            "expected numbers [M, 7] and [M]"
        )
    with np.errstate(over="ignore"):
        rows = boxes.astype(np.float32)
    return Labels(rows, tuple(str(name) for name in names))
