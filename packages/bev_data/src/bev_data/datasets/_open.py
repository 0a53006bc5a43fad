"""One door to every data set, and how each kind is labelled."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bev_data._errors import InputError
from bev_data.cameras import CAMERA_NAMES
from bev_data.datasets._frame_list import FrameList
from bevquant_quantizers import plugins

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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
    | "nuscenes" | the data root | version, split, scenes, sweeps, cameras, classes | six |
    | "mmdet3d" | an info file of mmdetection3d | root, sweeps, cameras, classes, box_origin, `points.read_points`'s | the file's |
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
    """  # noqa: E501 (the table)
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


def dataset_cameras(kind: str) -> tuple[str, ...]:
    """Names of the cameras of a kind of data set, in a model's order.

    They are the attribute `camera_names` of the function that opens the kind. Default: nuScenes'
    six.

    Raises:
        InputError: As `find_dataset`.

    Example:
        >>> dataset_cameras("kitti"), len(dataset_cameras("files"))
        (('CAM_FRONT',), 6)
    """
    names: tuple[str, ...] = getattr(find_dataset(kind), "camera_names", CAMERA_NAMES)
    return names


def find_dataset(kind: str) -> Opener:
    """The function that opens data sets of a kind; see `register_dataset`.

    Raises:
        InputError: An unknown kind, or its package cannot be imported.

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
    opener: Opener = plugins.load(entry, f"kind {kind!r}", InputError)
    return opener


def register_dataset(kind: str, opener: Opener) -> None:
    """Add a kind of data set to `open_dataset`.

    Args:
        kind: its name; a registered kind of this name is replaced.
        opener: called with `open_dataset`'s path as given (None without one) and its options;
            returns the frames. It raises `InputError` for unusable input. Its attribute
            `camera_names`, if any, is the result of `dataset_cameras`.

    Raises:
        InputError: an installed package has a kind of this name.
    """
    entry = _installed().get(kind)
    if entry is not None:
        of = "this package" if entry.module.startswith("bev_data.") else entry.value
        raise InputError(f"kind {kind!r} is a data set of {of}; choose another name")
    _added[kind] = opener


def _installed() -> dict[str, EntryPoint]:
    """Entry points by kind, this package's first: they cannot be replaced."""
    found: dict[str, EntryPoint] = {}
    for entry in plugins.installed(ENTRY_POINTS, own="bev_data"):
        found.setdefault(entry.name, entry)
    return found


def _check_options(kind: str, opener: Opener, options: dict[str, Any]) -> None:
    parameters = inspect.signature(opener).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return  # the opener knows
    known = [parameter.name for parameter in parameters if parameter.name != "path"]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InputError(f"{', '.join(unknown)}: {kind} has the options {', '.join(known)}")


# Half the width of KITTI's colour images over their focal length, 621 / 721.5: metres to each
# side that the camera sees for each metre ahead.
_KITTI_SIDE = 0.86


def labelled_region(
    kind: str | None,
) -> Callable[[npt.NDArray[np.float64]], npt.NDArray[np.bool_]] | None:
    """The region in which a data set's frames are labelled; None for everywhere.

    KITTI labels the view of its left colour camera, so a detection beside or behind the car is not
    wrong for lack of a label. Other data sets are labelled all around.

    Args:
        kind: The data set, as in `FrameList.kind`; None for other frames.

    Returns:
        A function from boxes [n, 7] with x right and y forward to bool [n].

    Example:
        >>> seen = labelled_region("kitti")
        >>> seen(np.array([[2.0, 10, 0, 4, 2, 2, 0], [9, 10, 0, 4, 2, 2, 0]])).tolist()
        [True, False]
    """
    if kind != "kitti":
        return None
    return lambda boxes: np.abs(boxes[:, 0]) <= _KITTI_SIDE * boxes[:, 1]


def range_origin(kind: str | None) -> tuple[float, float]:
    """Origin of a data set's distances to objects: x and y [m].

    nuScenes measures from the middle of the car's rear axle, 0.94 m behind the scanner (0.98 m on
    some of its cars); the others from the frame's own origin.

    Example:
        >>> range_origin("nuscenes"), range_origin("street")
        ((0.0, -0.94), (0.0, 0.0))
    """
    return (0.0, -0.94) if kind == "nuscenes" else (0.0, 0.0)


def scene_name(kind: str | None, frame: str) -> str | None:
    """The scene that a frame belongs to, by its name; None where each is a scene of its own.

    Example:
        >>> scene_name("nuscenes", "scene-0061_07"), scene_name("street", "street_7")
        ('scene-0061', None)
    """
    return frame.rpartition("_")[0] if kind == "nuscenes" else None
