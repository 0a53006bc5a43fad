"""One door to every data set."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeAlias

from bev_data._errors import InputError
from bev_data.datasets._frame_list import FrameList

__all__ = ["ENTRY_POINTS", "dataset_kinds", "find_dataset", "open_dataset", "register_dataset"]

ENTRY_POINTS = "bevquant.datasets"

_AnyPath = str | os.PathLike[str]
Opener: TypeAlias = Callable[..., FrameList]
_added: dict[str, Opener] = {}


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
    A package adds a kind as an entry point of the group ``bevquant.datasets``, as `bev_scenes` does
    with "street"; a program adds one with `register_dataset`.

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
    opener = find_dataset(kind)
    _check_options(kind, opener, options)
    return opener(path, **options)


def dataset_kinds() -> tuple[str, ...]:
    """Kinds that `open_dataset` knows: this package's, other packages', those registered.

    Example:
        >>> "kitti" in dataset_kinds()
        True
    """
    return (*_installed(), *_added)


def find_dataset(kind: str) -> Opener:
    """What opens data sets of a kind, as `register_dataset` describes it.

    Raises:
        InputError: There is no such kind, or the package that has it cannot be imported.

    Example:
        >>> find_dataset("kitti").__name__
        'kitti'
    """
    if kind in _added:
        return _added[kind]
    entry = _installed().get(kind)
    if entry is None:
        raise InputError(
            f"kind {kind!r}: expected one of {', '.join(dataset_kinds())}; a package adds one as "
            f"an entry point of the group {ENTRY_POINTS}, a program with register_dataset"
        )
    try:
        opener: Opener = entry.load()
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"kind {kind!r}: its entry point {entry.value} cannot be loaded: {error}; repair or "
            "remove the package that declares it"
        ) from error
    return opener


def register_dataset(kind: str, opener: Opener) -> None:
    """Let `open_dataset` open data sets of one more kind.

    Args:
        kind: its name; one that is registered already is replaced.
        opener: called with `open_dataset`'s path, as it was given (None where none was), and its
            options, and returns the frames. It refuses what it cannot use with an `InputError`.

    Raises:
        InputError: the name is one of the kinds that installed packages bring.

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
    entry = _installed().get(kind)
    if entry is not None:
        of = "this package" if _is_own(entry) else entry.value
        raise InputError(f"kind {kind!r} is a data set of {of}; choose another name")
    _added[kind] = opener


def _installed() -> dict[str, EntryPoint]:
    """Entry points by kind, this package's first: nobody replaces a kind of it."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda e: not _is_own(e)):
        found.setdefault(entry.name, entry)
    return found


def _is_own(entry: EntryPoint) -> bool:
    return entry.module.startswith("bev_data.")


def _check_options(kind: str, opener: Opener, options: dict[str, Any]) -> None:
    parameters = inspect.signature(opener).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return  # the opener knows
    known = [parameter.name for parameter in parameters if parameter.name != "path"]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InputError(f"{', '.join(unknown)}: {kind} has the options {', '.join(known)}")
