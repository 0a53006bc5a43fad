"""`.npz` files: an array of points under a key, and boxes with names where the file has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from bev_data.points._errors import PointsError
from bev_data.points._frame import Labels
from bevquant_quantizers.documents import DocumentError, read_arrays

__all__ = ["read_npz"]


def read_npz(
    path: Path, key: str, intensity_scale: float | None
) -> tuple[npt.NDArray[np.float32], Labels | None]:
    """Points [points, 5] float32 and labels of a `.npz` file; nothing is ever unpickled.

    Columns x, y, z, intensity and, as a fifth, the time lag in seconds (0 where absent). The
    intensity is taken as 0..255 already; `intensity_scale` multiplies it. Arrays `boxes` [M, 7]
    and `names` [M], where both are there, become labels.

    Raises:
        PointsError: not a zip archive, no array `key`, pickled objects, wrong shape or type.
    """
    try:
        arrays = read_arrays(path, (key,), optional=("boxes", "names"))
    except DocumentError as error:
        lacks = "no array" in str(error)
        remedy = f": save the points under {key!r} or say key=" if lacks else ""
        raise PointsError(f"{error}{remedy}") from error
    labels = None
    if "boxes" in arrays and "names" in arrays:
        labels = _labels(path, arrays["boxes"], arrays["names"])
    return _points(path, key, arrays[key], intensity_scale), labels


def _points(
    path: Path, key: str, rows: npt.NDArray[np.generic], intensity_scale: float | None
) -> npt.NDArray[np.float32]:
    if rows.ndim != 2 or rows.shape[1] not in (4, 5):
        raise PointsError(
            f"{path}: array {key!r} has shape {list(rows.shape)}; expected [N, 4] "
            "(x, y, z, intensity) or [N, 5] (… and time lag)"
        )
    if not np.issubdtype(rows.dtype, np.floating):
        raise PointsError(f"{path}: array {key!r} is {rows.dtype}; expected floating point numbers")
    points = np.zeros((len(rows), 5), np.float32)
    with np.errstate(over="ignore"):  # beyond float32 becomes Inf, which is reported as such
        points[:, : rows.shape[1]] = rows.astype(np.float32)
    if intensity_scale is not None:
        points[:, 3] *= np.float32(intensity_scale)
    return points


def _labels(path: Path, boxes: npt.NDArray[np.generic], names: npt.NDArray[np.generic]) -> Labels:
    fits = boxes.ndim == 2 and boxes.shape[1] == 7 and names.shape == (len(boxes),)
    if not fits or boxes.dtype.kind not in "iuf":
        raise PointsError(
            f"{path}: boxes {list(boxes.shape)} and names {list(names.shape)}; "
            "expected numbers [M, 7] and [M]"
        )
    with np.errstate(over="ignore"):
        rows = boxes.astype(np.float32)
    return Labels(rows, tuple(str(name) for name in names))
