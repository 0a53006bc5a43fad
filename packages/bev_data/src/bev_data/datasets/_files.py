"""Files of one's own: bare points, or folders with images beside them."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bev_data._errors import InputError
from bev_data.datasets._frame_folder import is_frame_folder, read_frame_folder
from bev_data.datasets._frame_list import FrameList
from bev_data.points import Frame, read_frames, read_points
from bev_data.points._read import check_values

_LOG = logging.getLogger(__name__)


def check_reading(options: Mapping[str, Any]) -> None:
    """Refuse options that `read_points` does not have, and values that no file can have.

    Raises:
        InputError: naming them.
    """
    known = [name for name in inspect.signature(read_points).parameters if name != "path"]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InputError(f"{', '.join(unknown)}: files have the options {', '.join(known)}")
    check_values(options)


def files(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None, **reading: Any
) -> FrameList:
    """Frames of files and folders, in order.

    A path is a points file, a folder of points files (both as `points.read_frames` takes them), a
    frame folder (with a `calib.json` that lists cameras, see `write_frame_folder`), or a folder of
    frame folders.

    Args:
        path: one path or several.
        reading: keyword arguments of `points.read_points`.

    Raises:
        InputError: nothing given, a missing file, an unknown extension, a folder without frames;
            at access whatever is damaged.
    """
    check_reading(reading)
    if path is None:
        raise InputError("a data set of kind 'files' needs a path")
    listed = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    keys: dict[Path, None] = {}
    for item in map(Path, listed):
        if item.is_dir() and is_frame_folder(item):
            keys[item] = None
            continue
        if (item / "calib.json").is_file():
            _LOG.warning(
                '%s lists no "cameras"; points are read without images', item / "calib.json"
            )
        inside = sorted(item.iterdir()) if item.is_dir() else []
        folders = [folder for folder in inside if folder.is_dir() and is_frame_folder(folder)]
        keys.update(dict.fromkeys(folders or read_frames(item).paths))
    if not keys:
        raise InputError("no frames given: name at least one file or folder")

    def read(key: Path) -> Frame:
        if key.is_dir():
            return read_frame_folder(key, **reading)
        return read_points(key, **reading)

    return FrameList("files", tuple(keys), read)
