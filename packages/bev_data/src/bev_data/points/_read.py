"""From a path to a frame: which reader, what is refused, and folders of files."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from bev_data.points._binary import points_of, read_binary
from bev_data.points._errors import PointsError
from bev_data.points._frame import Frame, Labels, VoxelData, rows_of
from bev_data.points._nvidia_tensor import find_sibling, load_tensor, read_voxels
from bevquant_quantizers.documents import DocumentError, read_arrays


def read_npz(
    path: Path, key: str, intensity_scale: float | None
) -> tuple[npt.NDArray[np.float32], Labels | None]:
    """Points [points, 5] float32 and labels of a `.npz` file; nothing is ever unpickled.

    Columns x, y, z, intensity and, as a fifth, the time lag in seconds (0 where absent), by the
    rules of `points_of`. Arrays `boxes` [M, 7]
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
    with np.errstate(over="ignore"):  # beyond float32 becomes Inf, which is reported as such
        floats = rows.astype(np.float32)
    return points_of(path, floats, f"array {key!r} {list(rows.shape)}", intensity_scale)


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


_LOG = logging.getLogger(__name__)
_EXTENSIONS = (".pcd.bin", ".bin", ".npz", ".tensor")
_AnyPath = str | os.PathLike[str]


def read_points(
    path: _AnyPath,
    *,
    columns: int | None = None,
    dtype: str | None = None,
    key: str = "points",
    intensity_scale: float | None = None,
    nonfinite: Literal["raise", "drop"] = "raise",
) -> Frame:
    """Read one LiDAR frame.

    | file | columns | intensity becomes 0..255 by | time lag |
    |---|---|---|---|
    | `.bin`, `.pcd.bin`, five columns (nuScenes), float32 or float16 | x, y, z, intensity, ring | × 1 | 0; a fifth column that is no ring number is the lag |
    | `.bin`, four columns (KITTI), float32 | x, y, z, intensity 0..1 | × 255 | 0 |
    | `.bin`, `columns=4` said | x, y, z, intensity 0..1 or 0..255 | × 255 where all are 0..1, else × 1 | 0 |
    | `.npz`, array `key`, and `.tensor` (NVIDIA), [N, 5] | x, y, z, intensity, time lag or ring | × 1 | 0; a fifth column that is no ring number is the lag |
    | `.npz`, array `key`, and `.tensor` (NVIDIA), [N, 4] | x, y, z, intensity 0..1 or 0..255 | × 255 where all are 0..1, else × 1 | 0 |
    | `…in_features….tensor` with `…in_indices_xyz….tensor` | voxels made elsewhere | × 1 | as stored |

    Args:
        path: the file; of a pair of voxel files either one.
        columns: columns of a `.bin`, 4 or 5, where the size and the values leave it open.
        dtype: "float32" or "float16", the number type of a `.bin`.
        key: name of the array in a `.npz`.
        intensity_scale: factor on the intensity instead of the table's.
        nonfinite: "raise" refuses NaN and Inf, "drop" leaves those rows out (and logs how many).

    Returns:
        The frame, named after the file.

    Raises:
        PointsError: missing file, unknown extension, no points, a layout that does not fit,
            damaged data, NaN or Inf.

    Examples:
        >>> import numpy as np, pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name) / "000000.bin"
        >>> np.array([[5, -1, 0, 0.5], [6, -2, 0, 1]], "<f4").tofile(path)
        >>> read_points(path).points[:, 3].tolist()
        [127.5, 255.0]
        >>> folder.cleanup()
    """  # noqa: E501 (the table)
    if columns not in (None, 4, 5):
        raise PointsError(f"columns={columns}: a .bin has 4 columns (KITTI) or 5 (nuScenes)")
    if dtype not in (None, "float32", "float16"):
        raise PointsError(f"dtype={dtype!r}: expected 'float32' or 'float16'")
    if nonfinite not in ("raise", "drop"):
        raise PointsError(f"nonfinite={nonfinite!r}: expected 'raise' or 'drop'")
    file = Path(path)
    extension = _extension_of(file)
    _must_be_file(file)
    try:
        frame = _read(file, extension, columns, dtype, key, intensity_scale)
    except DocumentError as error:
        raise PointsError(str(error)) from error
    if len(frame) == 0:
        raise PointsError(f"{file}: holds no points")
    return _without_nonfinite(file, frame, nonfinite)


def _read(
    file: Path,
    extension: str,
    columns: int | None,
    dtype: str | None,
    key: str,
    intensity_scale: float | None,
) -> Frame:
    name = file.name[: -len(extension)]
    if extension in (".bin", ".pcd.bin"):
        return Frame(name, read_binary(file, columns, dtype, intensity_scale))
    if extension == ".npz":
        points, labels = read_npz(file, key, intensity_scale)
        return Frame(name, points, labels=labels)
    pair = find_sibling(file)
    if pair is not None:
        voxels = read_voxels(*pair)
        prefix = pair[0].name.partition("in_features")[0].rstrip("._-")
        return Frame(prefix or file.absolute().parent.name or name, voxels=voxels)
    array = load_tensor(file)
    if array.ndim != 2 or array.shape[1] not in (4, 5) or array.dtype.kind != "f":
        raise PointsError(
            f"{file}: {array.dtype} {list(array.shape)}; expected points, floating point [N, 5] "
            "or [N, 4], or voxels in files named …in_features….tensor and …in_indices_xyz….tensor"
        )
    floats = array.astype(np.float32)
    return Frame(name, points_of(file, floats, f"points {list(array.shape)}", intensity_scale))


def _without_nonfinite(file: Path, frame: Frame, nonfinite: str) -> Frame:
    rows = rows_of(frame)
    finite = np.isfinite(rows).all(axis=1)
    if finite.all():
        return frame
    bad = np.flatnonzero(~finite)
    found = (
        f"{file}: {len(bad)} of {len(rows)} rows hold NaN or Inf, the first is row {bad[0]}: "
        f"{rows[bad[0]].tolist()}"
    )
    if nonfinite == "raise":
        raise PointsError(f"{found}; clean the file, or leave such rows out with nonfinite='drop'")
    if len(bad) == len(rows):
        raise PointsError(f"{found}; nothing is left without them")
    _LOG.warning("%s; left out", found)
    if frame.voxels is None:
        return replace(frame, points=rows[finite])
    return replace(frame, voxels=VoxelData(rows[finite], frame.voxels.coords[finite]))


class FrameFiles(Sequence[Frame]):
    """The frames of several files, read one at a time when asked for.

    Holds paths alone, so that a long list costs no memory; every access reads the file again.

    Args:
        paths: one file per frame.
        options: keyword arguments of `read_points`.
    """

    def __init__(self, paths: Iterable[Path], **options: Any) -> None:
        self.paths = tuple(paths)
        self._options = options

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> Frame: ...
    @overload
    def __getitem__(self, index: slice) -> FrameFiles: ...
    def __getitem__(self, index: int | slice) -> Frame | FrameFiles:
        if isinstance(index, slice):
            return FrameFiles(self.paths[index], **self._options)
        return read_points(self.paths[index], **self._options)

    def __repr__(self) -> str:
        return f"FrameFiles({len(self)} files)"


def read_frames(paths: _AnyPath | Iterable[_AnyPath], **options: object) -> FrameFiles:
    """Frames of files and of folders, in order.

    A folder stands for its own files with a known extension, sorted by name (not its sub-folders).
    The two files of a voxel pair are one frame. Missing files, unknown extensions and empty
    folders are refused at once; the content is checked when a frame is read.

    Args:
        paths: one path or several, files or folders.
        options: keyword arguments of `read_points`, for every file.

    Returns:
        A sequence that reads each frame when it is asked for.

    Raises:
        PointsError: nothing given, a missing file, an unknown extension, a folder without frames,
            and at access whatever `read_points` refuses.
    """
    listed = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    files: dict[Path, None] = {}
    for item in map(Path, listed):
        for file in _files_of(item) if item.is_dir() else [item]:
            if not file.suffix:
                _must_exist(file)
            _extension_of(file)
            _must_be_file(file)
            pair = find_sibling(file)
            files[pair[0] if pair else file] = None
    if not files:
        raise PointsError("no frames given: name at least one file or folder")
    return FrameFiles(files, **options)


def _files_of(folder: Path) -> list[Path]:
    inside = sorted(entry for entry in folder.iterdir() if entry.is_file())
    known = [entry for entry in inside if entry.name.lower().endswith(_EXTENSIONS)]
    if not known:
        raise PointsError(
            f"{folder}: the folder holds no frames ({len(inside)} other files); expected "
            f"{', '.join(_EXTENSIONS)}"
        )
    if len(known) < len(inside):
        _LOG.info("%s: %d files of other kinds passed over", folder, len(inside) - len(known))
    return known


def _extension_of(file: Path) -> str:
    for extension in _EXTENSIONS:
        if file.name.lower().endswith(extension):
            return extension
    raise PointsError(
        f"{file}: unknown extension {file.suffix or '(none)'!r}; expected {', '.join(_EXTENSIONS)}"
    )


def _must_exist(file: Path) -> None:
    if file.exists():
        return
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    names = sorted(f"{e.name}/" if e.is_dir() else e.name for e in folder.iterdir())
    near = get_close_matches(file.name, names, 3, 0.4) or names[:3]
    there = f"it holds {', '.join(near)}{', …' if len(names) > len(near) else ''}"
    raise PointsError(
        f"{file}: no such file or folder; looked in {folder}: {there if names else 'it is empty'}; "
        f"give a file of points ({', '.join(_EXTENSIONS)}) or a folder of them"
    )


def _must_be_file(file: Path) -> None:
    if file.is_dir():
        raise PointsError(f"{file}: a folder, not a file; read_frames reads folders")
    _must_exist(file)
    if not file.is_file():
        raise PointsError(f"{file}: not a regular file")
