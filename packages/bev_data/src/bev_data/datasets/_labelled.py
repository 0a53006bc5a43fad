"""How a data set is labelled: where, and which frames belong to one scene."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

__all__ = ["labelled_region", "range_origin", "scene_name"]

# Half the width of KITTI's colour images over their focal length, 621 / 721.5: metres to each
# side that the camera sees for each metre ahead.
_KITTI_SIDE = 0.86


def labelled_region(
    kind: str | None,
) -> Callable[[npt.NDArray[np.float64]], npt.NDArray[np.bool_]] | None:
    """Which boxes lie where the data set's frames are labelled; None where that is everywhere.

    KITTI labels what its left colour camera sees, and a detection beside or behind the car is not
    wrong for having no label. Everything else is labelled all around.

    Args:
        kind: The data set, as `FrameList.kind` has it; None for frames from elsewhere.

    Returns:
        A function of boxes [n, 7] with x right and y forward, that answers bool [n].

    Example:
        >>> seen = labelled_region("kitti")
        >>> seen(np.array([[2.0, 10, 0, 4, 2, 2, 0], [9, 10, 0, 4, 2, 2, 0]])).tolist()
        [True, False]
    """
    if kind != "kitti":
        return None
    return lambda boxes: np.abs(boxes[:, 0]) <= _KITTI_SIDE * boxes[:, 1]


def range_origin(kind: str | None) -> tuple[float, float]:
    """From where a data set measures how far an object is: x and y [m].

    nuScenes measures from the middle of the car's rear axle, which lies 0.94 m behind the scanner
    (0.98 m on some of its cars); the others from the frame's own origin.

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
