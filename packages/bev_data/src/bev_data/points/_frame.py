"""The result of every reader: one LiDAR frame, as points or as voxels made elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from bev_data._errors import InputError
from bev_data._motion import inverse, move_boxes, move_points
from bev_data.boxes import Detections
from bev_data.cameras import Camera

# The one error of the readers.


class PointsError(InputError):
    """A frame cannot be read or holds something that must not be used.

    The message names the file, what was found, what was expected and what to do. It is meant to
    be shown to the user as it is.

    Attributes:
        reason: The problem alone, where other layouts of the file are tried.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class VoxelData(NamedTuple):
    """Voxels made elsewhere.

    Attributes:
        features: float32 [voxels, 5], the mean x, y, z [m], intensity [0..255] and time lag [s].
        coords: int32 [voxels, 4], batch, x, y, z as cell numbers.
    """

    features: npt.NDArray[np.float32]
    coords: npt.NDArray[np.int32]


class Labels(NamedTuple):
    """Labelled objects of a frame.

    Attributes:
        boxes: float32 [objects, 7], centre x, y, z, length, width, height [m] and yaw [rad],
            counter-clockwise from +x to the direction of the length.
        names: the class of each box.
        velocities: float32 [objects, 2], along x and y of the frame [m/s]; NaN where not known.
        visibility: float32 [objects], 0..1, the share of the object's own silhouette or returns
            that nothing hides; NaN where not known.
        num_points: int32 [objects], the LiDAR points inside.
    """

    boxes: npt.NDArray[np.float32]
    names: tuple[str, ...]
    velocities: npt.NDArray[np.float32] | None = None
    visibility: npt.NDArray[np.float32] | None = None
    num_points: npt.NDArray[np.int32] | None = None


@dataclass(frozen=True, eq=False)
class Frame:
    """One LiDAR frame: either `points` or `voxels`, never both.

    Args:
        name: a short name, for file names and pictures.
        points: float32 [points, 5], columns x, y, z [m], intensity [0..255] and time lag [s]
            (0 for the newest sweep, growing into the past).
        voxels: voxels made elsewhere, where the file held voxels.
        labels: boxes and class names, where the source has them.
        cameras: the pictures taken with the points, where the source has them.

    Raises:
        PointsError: both or neither of points and voxels, arrays of another shape or type, boxes
            with NaN or without a size, or two cameras of one name.

    Examples:
        >>> import numpy as np
        >>> frame = Frame("two points", np.zeros((2, 5), np.float32))
        >>> len(frame), frame.voxels is None
        (2, True)
    """

    name: str
    points: npt.NDArray[np.float32] | None = None
    voxels: VoxelData | None = None
    labels: Labels | None = None
    cameras: tuple[Camera, ...] = ()

    def __post_init__(self) -> None:
        if (self.points is None) == (self.voxels is None):
            raise PointsError(f"{self.name}: a frame holds either points or voxels, exactly one")
        if self.points is not None:
            _check(self.name, "points", self.points, np.float32, 5)
        if self.voxels is not None:
            features, coords = self.voxels
            _check(self.name, "voxels.features", features, np.float32, 5)
            _check(self.name, "voxels.coords", coords, np.int32, 4)
            if len(features) != len(coords):
                raise PointsError(
                    f"{self.name}: {len(features)} voxel features but {len(coords)} coordinates"
                )
        if self.labels is not None:
            _check_labels(self.name, self.labels)
        names = [camera.name for camera in self.cameras]
        if len(set(names)) < len(names):
            raise PointsError(f"{self.name}: cameras {', '.join(names)}; each name must be its own")

    def __len__(self) -> int:
        """Number of points, or of voxels where the frame holds voxels."""
        return len(rows_of(self))


Objects = TypeVar("Objects", Labels, Detections)


def move_objects(objects: Objects, motion: npt.NDArray[np.float64]) -> Objects:
    """The same objects in other axes: boxes and velocities.

    Args:
        objects: Of a frame.
        motion: [4, 4], from the frame's axes to the others; of `axes_motion`, for example.
    """
    speeds = objects.velocities
    if speeds is not None:
        speeds = (speeds @ motion[:2, :2].T).astype(np.float32)
    return objects._replace(boxes=move_boxes(objects.boxes, motion), velocities=speeds)


def move_frame(frame: Frame, motion: npt.NDArray[np.float64]) -> Frame:
    """The same frame in other axes: points, labels and cameras.

    Args:
        frame: With points.
        motion: As in `move_objects`.

    Raises:
        PointsError: The frame holds voxels.

    Example:
        >>> from bev_data.points import axes_motion
        >>> frame = Frame("one point", np.float32([[5, -1, 0, 100, 0]]))
        >>> move_frame(frame, axes_motion("forward,left,up")).points[0, :3].tolist()
        [1.0, 5.0, 0.0]
    """
    if frame.points is None:
        raise PointsError(f"{frame.name}: holds voxels, whose axes cannot be changed; give points")
    back = inverse(motion)
    return replace(
        frame,
        points=move_points(frame.points, motion),
        labels=frame.labels and move_objects(frame.labels, motion),
        cameras=tuple(
            replace(one, lidar_to_camera=one.lidar_to_camera @ back) for one in frame.cameras
        ),
    )


def rows_of(frame: Frame) -> npt.NDArray[np.float32]:
    """The points, or the features of the voxels where the frame holds voxels."""
    if frame.voxels is not None:
        return frame.voxels.features
    assert frame.points is not None  # a frame without both cannot be made
    return frame.points


def _check_labels(name: str, labels: Labels) -> None:
    boxes = labels.boxes
    _check(name, "labels.boxes", boxes, np.float32, 7)
    if len(boxes) != len(labels.names):
        raise PointsError(f"{name}: {len(boxes)} boxes but {len(labels.names)} class names")
    for what, dtype, shape in (
        ("velocities", np.float32, (len(boxes), 2)),
        ("visibility", np.float32, (len(boxes),)),
        ("num_points", np.int32, (len(boxes),)),
    ):
        array = getattr(labels, what)
        if array is not None and (array.shape != shape or array.dtype != np.dtype(dtype)):
            raise PointsError(
                f"{name}: labels.{what} must be {np.dtype(dtype)} {list(shape)} for "
                f"{len(boxes)} boxes, not {array.dtype} {list(array.shape)}"
            )
    bad = np.flatnonzero(~(np.isfinite(boxes).all(axis=1) & (boxes[:, 3:6] > 0).all(axis=1)))
    if len(bad):
        row = bad[0]
        raise PointsError(
            f"{name}: {len(bad)} of {len(boxes)} boxes hold NaN or Inf or a size that is not "
            f"positive, the first is box {row} ({labels.names[row]}): {boxes[row].tolist()}; "
            "correct or leave out such boxes"
        )
    if labels.velocities is not None and np.isinf(labels.velocities).any():
        raise PointsError(f"{name}: labels.velocities holds Inf; NaN says that it is not known")
    if labels.visibility is not None:
        known = labels.visibility[~np.isnan(labels.visibility)]
        if len(known) and (known.min() < 0 or known.max() > 1):
            raise PointsError(
                f"{name}: labels.visibility spans {known.min():g}..{known.max():g}; expected a "
                "share, 0..1, or NaN where it is not known"
            )
    if labels.num_points is not None and len(boxes) and labels.num_points.min() < 0:
        raise PointsError(f"{name}: labels.num_points holds {labels.num_points.min()}")


def _check(
    name: str, what: str, array: npt.NDArray[np.generic], dtype: type[np.generic], columns: int
) -> None:
    if array.ndim != 2 or array.shape[1] != columns or array.dtype != np.dtype(dtype):
        raise PointsError(
            f"{name}: {what} must be {np.dtype(dtype)} [N, {columns}], "
            f"not {array.dtype} {list(array.shape)}"
        )
