"""`.npz` files: an array of points under a key, and boxes with names where the file has them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bevfusion_quant.points._errors import PointsError
from bevfusion_quant.points._frame import Labels

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
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise PointsError(f"{path}: a bare .npy array, not an .npz archive")
            if key not in archive.files:
                raise PointsError(
                    f"{path}: no array {key!r}; the archive holds {sorted(archive.files)}: "
                    f"save the points under {key!r} or say key="
                )
            rows = _member(path, archive, key)
            labels = None
            if "boxes" in archive.files and "names" in archive.files:
                labels = _labels(
                    path, _member(path, archive, "boxes"), _member(path, archive, "names")
                )
    except PointsError:
        raise
    except (zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        raise PointsError(f"{path}: not a readable .npz archive ({error})") from error
    return _points(path, key, rows, intensity_scale), labels


def _member(path: Path, archive: np.lib.npyio.NpzFile, key: str) -> npt.NDArray[np.generic]:
    try:
        array: npt.NDArray[np.generic] = archive[key]
    except ValueError as error:
        if "pickle" not in str(error).lower() and "object" not in str(error).lower():
            raise
        raise PointsError(
            f"{path}: array {key!r} holds pickled Python objects, which are never loaded; "
            "save it as a plain numeric array"
        ) from error
    return array


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
    if boxes.ndim != 2 or boxes.shape[1] != 7 or names.shape != (len(boxes),):
        raise PointsError(
            f"{path}: boxes {list(boxes.shape)} and names {list(names.shape)}; "
            "expected [M, 7] and [M]"
        )
    return Labels(boxes.astype(np.float32), tuple(str(name) for name in names))
