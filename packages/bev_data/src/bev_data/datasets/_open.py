"""One door to every data set."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bev_data._errors import InputError
from bev_data.datasets._files import files
from bev_data.datasets._frame_list import FrameList
from bev_data.datasets._kitti import kitti
from bev_data.datasets._nuscenes import nuscenes
from bev_data.datasets._pandaset import pandaset

__all__ = ["open_dataset", "register_dataset"]

_AnyPath = str | os.PathLike[str]
Opener = Callable[..., FrameList]


def open_dataset(
    kind: str, path: _AnyPath | Iterable[_AnyPath] | None = None, **options: Any
) -> FrameList:
    """Frames of a data set, in one form: LiDAR x right, y forward, z up; cameras; labels.

    | kind | path | options | cameras |
    |---|---|---|---|
    | "pandaset" | a sequence in compact form | images, cameras, origin_height | six |
    | "kitti" | the folder with velodyne, image_2, … | cameras | CAM_FRONT |
    | "nuscenes" | the data root | version, split, scenes, sweeps, cameras | six |
    | "files" | points files, frame folders, or folders of them | `points.read_points`'s | its own |

    `cameras` is "all" (a frame without its images is an error), "available" (such frames are left
    out; not for nuScenes) or "none". Classes carry nuScenes' ten detection names where there is
    one, else the data set's own. What is missing is refused at once; files are read at access.
    `register_dataset` adds kinds; importing `bev_scenes` adds "street".

    Args:
        kind: the data set.
        path: where it is.
        options: see the table.

    Returns:
        A sequence that reads each frame when it is asked for and holds none.

    Raises:
        InputError: unknown kind or option, a missing path, and whatever the data set refuses.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> from bev_data.datasets import write_frame_folder
        >>> from bev_data.points import Frame
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_frame_folder(f"{folder}/a", Frame("a", np.ones((9, 5), np.float32)))
        ...     frames = open_dataset("files", folder)
        ...     len(frames), frames[0].points.shape
        (1, (9, 5))
    """
    if kind not in _OPENERS:
        raise InputError(f"kind {kind!r}: expected one of {', '.join(_OPENERS)}")
    opener = _OPENERS[kind]
    if kind in _FILE_KINDS and path is None:
        raise InputError(f"a data set of kind {kind!r} needs a path")
    if kind in _FOLDER_KINDS:
        if not isinstance(path, (str, os.PathLike)):
            raise InputError(f"a data set of kind {kind!r} is one folder, not several paths")
        path = Path(path)
        if not path.is_dir():
            raise InputError(f"{path}: no such folder")
    _check_options(kind, opener, options)
    return opener(path, **options)


def register_dataset(kind: str, opener: Opener) -> None:
    """Let `open_dataset` open data sets of one more kind.

    Args:
        kind: its name; one that is registered already is replaced.
        opener: called with `open_dataset`'s path, as it was given (None where none was), and its
            options, and returns the frames. It refuses what it cannot use with an `InputError`.

    Raises:
        InputError: the name is one of the kinds that this package brings.

    Examples:
        >>> import numpy as np
        >>> from bev_data.points import Frame
        >>> def zeros(path, *, count=1):
        ...     empty = np.zeros((9, 5), np.float32)
        ...     return FrameList("zeros", range(count), lambda key: Frame(f"{key}", empty))
        >>> register_dataset("zeros", zeros)
        >>> open_dataset("zeros", count=3)
        FrameList(zeros, 3 frames)
    """
    if kind in _FILE_KINDS:
        raise InputError(f"kind {kind!r} is a data set of this package; choose another name")
    _OPENERS[kind] = opener


_FOLDER_KINDS = ("pandaset", "kitti", "nuscenes")
_FILE_KINDS = (*_FOLDER_KINDS, "files")
_OPENERS: dict[str, Opener] = {
    "pandaset": pandaset,
    "kitti": kitti,
    "files": files,
    "nuscenes": nuscenes,
}


def _check_options(kind: str, opener: Opener, options: dict[str, Any]) -> None:
    parameters = inspect.signature(opener).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return  # the opener knows
    known = [parameter.name for parameter in parameters if parameter.name != "path"]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InputError(f"{', '.join(unknown)}: {kind} has the options {', '.join(known)}")
