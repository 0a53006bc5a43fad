"""From a path to a frame: choice of the reader, refusals, folders of files."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from bev_data._motion import axes_motion
from bev_data.points._binary import read_binary
from bev_data.points._columns import NAMES, Array, Content, Said, parse_columns, points_of
from bev_data.points._frame import Frame, Labels, PointsError, VoxelData, move_frame, rows_of
from bev_data.points._nvidia_tensor import find_sibling, load_tensor, read_voxels
from bev_data.points._pcd import read_pcd
from bevquant_quantizers.documents import DocumentError, read_array, read_arrays

# `.npz` archives and `.npy` arrays; nothing is ever unpickled.


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


# `.feather` files through pyarrow, the extra `feather`.


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


_LOG = logging.getLogger(__name__)
_EXTENSIONS = (".pcd.bin", ".bin", ".npz", ".npy", ".pcd", ".feather", ".tensor")
_PICKLES = (".pkl", ".pickle", ".pkl.gz")
_AnyPath = str | os.PathLike[str]


def read_points(
    path: _AnyPath,
    *,
    columns: int | str | Sequence[str] | None = None,
    dtype: str | None = None,
    key: str = "points",
    intensity_scale: float | None = None,
    axes: str | Sequence[str] = "right,forward,up",
    nonfinite: Literal["raise", "drop"] = "raise",
) -> Frame:
    """Read one LiDAR frame.

    | file | columns without `columns=` | intensity becomes 0..255 by | time lag |
    |---|---|---|---|
    | `.bin`, `.pcd.bin`, five columns (nuScenes), float32 or float16 | x, y, z, intensity, ring | × 1 | 0; a fifth column that is no ring number is the lag |
    | `.bin`, four columns (KITTI), float32 | x, y, z, intensity 0..1 | × 255 | 0 |
    | `.npy`, `.npz` (array `key`) and `.tensor` (NVIDIA), [N, 5] | as in a `.bin` | × 1 | as in a `.bin` |
    | the same, [N, 4], and a `.bin` with `columns=4` | x, y, z, intensity | × 255 if all are 0..1, else × 1 | 0 |
    | `.pcd`, `.feather`, records in a `.npy`, arrays x, y, z, … in a `.npz` | by name, synonyms too | × 255 for floats 0..1, else × 1 | from `time`, `offset_ns`, …, else 0 |
    | `…in_features….tensor` with `…in_indices_xyz….tensor` | voxels made elsewhere | × 1 | as stored |

    `columns` lists roles: `x`, `y`, `z` [m]; `intensity`; one time; `ring` and `-`, which are not
    used. `time` [s] is an age, `offset` and `timestamp` grow with time; `_ms`, `_us` or `_ns` behind
    them is another unit. `ROLE:NAME` takes a named column: `intensity:refl`. Lists are in the order
    of a file without names, in any order of others. Without intensity or a time, that is 0.

    Args:
        path: the file; of a pair of voxel files either one.
        columns: a list, as "x,y,z,intensity,ring"; or 4 or 5, if the size and the values of a
            `.bin` leave that open.
        dtype: "float32", "float16" or "float64", the number type of a `.bin`.
        key: name of the array in a `.npz`.
        intensity_scale: factor on the intensity instead of the table's.
        axes: directions of the file's x, y and z: "forward,left,up" is KITTI's, Argoverse 2's and
            ROS'. Points and labels are turned to x right, y forward, z up.
        nonfinite: "raise" refuses NaN and Inf, "drop" leaves those rows out (and logs how many).

    Returns:
        The frame, named after the file.

    Raises:
        PointsError: missing file, unknown extension, no points, a layout that does not fit,
            columns that are missing or in doubt, values that cannot be right (coordinates from
            1000 m on, intensities outside of 0..255, lags beyond 10 s), damaged data, NaN or Inf.

    Examples:
        >>> import numpy as np, pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name) / "000000.bin"
        >>> np.array([[5, -1, 0, 0.5], [6, -2, 0, 1]], "<f4").tofile(path)
        >>> read_points(path).points[:, 3].tolist()
        [127.5, 255.0]
        >>> folder.cleanup()
    """  # noqa: E501 (the table)
    said = parse_columns(columns)
    if dtype not in (None, "float32", "float16", "float64"):
        raise PointsError(f"dtype={dtype!r}: expected 'float32', 'float16' or 'float64'")
    if nonfinite not in ("raise", "drop"):
        raise PointsError(f"nonfinite={nonfinite!r}: expected 'raise' or 'drop'")
    motion = axes_motion(axes)
    file = Path(path)
    extension = _extension_of(file)
    _must_be_file(file)
    try:
        frame = _read(file, extension, said, dtype, key, intensity_scale)
    except DocumentError as error:
        raise PointsError(str(error)) from error
    if len(frame) == 0:
        raise PointsError(f"{file}: holds no points")
    frame = _without_nonfinite(file, frame, nonfinite)
    if motion is None:
        return frame
    if frame.points is None:
        raise PointsError(f"{file}: holds voxels, whose axes cannot be changed; leave axes= out")
    return move_frame(frame, motion)


def _read(
    file: Path,
    extension: str,
    said: Said,
    dtype: str | None,
    key: str,
    intensity_scale: float | None,
) -> Frame:
    name, labels = file.name[: -len(extension)], None
    if extension in (".bin", ".pcd.bin"):
        return Frame(name, read_binary(file, said, dtype, intensity_scale))
    pair = find_sibling(file)
    if pair is not None:
        voxels = read_voxels(*pair)
        prefix = pair[0].name.partition("in_features")[0].rstrip("._-")
        return Frame(prefix or file.absolute().parent.name or name, voxels=voxels)
    label = "the array"
    if extension == ".npz":
        names = tuple(own for _, own, _ in said) if isinstance(said, tuple) else ()
        content, labels = read_npz(file, key, names)
        label = f"array {key!r}"
    else:
        content = _READERS[extension](file)
    return Frame(name, points_of(file, content, said, label, intensity_scale), labels=labels)


def _read_tensor(file: Path) -> Content:
    rows = load_tensor(file)
    if rows.ndim != 2 or rows.dtype.kind != "f":
        raise PointsError(
            f"{file}: {rows.dtype} {list(rows.shape)}; expected points, floating point [N, 5] or "
            "[N, 4], or voxels in files named …in_features….tensor and …in_indices_xyz….tensor"
        )
    return rows


_READERS: dict[str, Callable[[Path], Content]] = {
    ".npy": read_array,
    ".pcd": read_pcd,
    ".feather": read_feather,
    ".tensor": _read_tensor,
}


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


def read_frames(paths: _AnyPath | Iterable[_AnyPath], **options: Any) -> FrameFiles:
    """Frames of files and of folders, in order.

    A folder stands for its own files with a known extension, sorted by name (not its sub-folders).
    The two files of a voxel pair are one frame. Missing files, unknown extensions, empty folders,
    columns and axes that cannot be are refused at once; the content is checked when a frame is
    read.

    Args:
        paths: one path or several, files or folders.
        options: keyword arguments of `read_points`, for every file.

    Returns:
        A sequence that reads each frame when it is asked for.

    Raises:
        PointsError: nothing given, a missing file, an unknown extension, a folder without frames,
            and at access whatever `read_points` refuses.
    """
    check_values(options)
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


def check_values(options: Mapping[str, Any]) -> None:
    """Refuse columns and axes that no file can have, before a file is read.

    Raises:
        InputError: as `read_points`.
    """
    parse_columns(options.get("columns"))
    axes_motion(options.get("axes", "right,forward,up"))


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
    if file.name.lower().endswith(_PICKLES):
        raise PointsError(
            f"{file}: a pickle can run code and is not read; convert it once, if you trust it: "
            f"python -c \"import pandas; pandas.read_pickle('{file.name}').to_feather('"
            f"{file.name.partition('.')[0]}.feather')\"; infos of mmdetection3d are a data set: "
            "open_dataset('mmdet3d', …), --dataset mmdet3d"
        )
    if file.is_dir():
        _must_be_file(file)
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
