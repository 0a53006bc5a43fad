"""One door to every data set."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args

from bevfusion_quant._errors import InputError
from bevfusion_quant.datasets._files import files
from bevfusion_quant.datasets._frame_list import FrameList
from bevfusion_quant.datasets._kitti import kitti
from bevfusion_quant.datasets._nuscenes import nuscenes
from bevfusion_quant.datasets._pandaset import pandaset
from bevfusion_quant.datasets._street import street

__all__ = ["DatasetKind", "open_dataset"]

_AnyPath = str | os.PathLike[str]
DatasetKind = Literal["street", "pandaset", "kitti", "files", "nuscenes"]
_FOLDERS: dict[str, Callable[..., FrameList]] = {
    "pandaset": pandaset,
    "kitti": kitti,
    "nuscenes": nuscenes,
}


def open_dataset(
    kind: DatasetKind | str, path: _AnyPath | Iterable[_AnyPath] | None = None, **options: Any
) -> FrameList:
    """Frames of a data set, in one form: LiDAR x right, y forward, z up; cameras; labels.

    | kind | path | options | cameras |
    |---|---|---|---|
    | "street" | none | count=1, first_seed=0, and `scenes.street_frame`'s | as asked for |
    | "pandaset" | a sequence in compact form | images, cameras, origin_height | six |
    | "kitti" | the folder with velodyne, image_2, … | cameras | CAM_FRONT |
    | "nuscenes" | the data root | version, split, scenes, sweeps, cameras | six |
    | "files" | points files, frame folders, or folders of them | `points.read_points`'s | its own |

    `cameras` is "all" (a frame without its images is an error), "available" (such frames are left
    out; not for nuScenes) or "none". Classes carry nuScenes' ten detection names where there is
    one, else the data set's own. What is missing is refused at once; files are read at access.

    Args:
        kind: the data set.
        path: where it is.
        options: see the table.

    Returns:
        A sequence that reads each frame when it is asked for and holds none.

    Raises:
        InputError: unknown kind or option, a missing path, and whatever the data set refuses.

    Examples:
        >>> frames = open_dataset("street", count=1000, beams=8, sweeps=1, azimuth_steps=90)
        >>> len(frames), frames[7].name
        (1000, 'street_7')
    """
    if kind not in get_args(DatasetKind):
        raise InputError(f"kind {kind!r}: expected one of {', '.join(get_args(DatasetKind))}")
    if kind == "street":
        _check_options(kind, street, options)
        return street(path, **options)  # type: ignore[arg-type]
    if path is None:
        raise InputError(f"a data set of kind {kind!r} needs a path")
    if kind == "files":
        _check_options(kind, files, options)
        return files(path, **options)
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"a data set of kind {kind!r} is one folder, not several paths")
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    _check_options(kind, _FOLDERS[kind], options)
    return _FOLDERS[kind](folder, **options)


def _check_options(kind: str, opener: Callable[..., FrameList], options: dict[str, Any]) -> None:
    parameters = inspect.signature(opener).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return  # the opener knows
    known = [parameter.name for parameter in parameters if parameter.name != "path"]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InputError(f"{', '.join(unknown)}: {kind} has the options {', '.join(known)}")
