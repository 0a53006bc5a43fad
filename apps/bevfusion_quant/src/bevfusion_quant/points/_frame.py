"""What every reader hands back: one LiDAR frame, as points or as voxels made elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bevfusion_quant.points._errors import PointsError

__all__ = ["Frame", "Labels", "VoxelData"]


class VoxelData(NamedTuple):
    """Voxels that somebody else has made.

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
    """

    boxes: npt.NDArray[np.float32]
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Frame:
    """One LiDAR frame: either `points` or `voxels`, never both.

    Args:
        name: a short name, for file names and pictures.
        points: float32 [points, 5], columns x, y, z [m], intensity [0..255] and time lag [s]
            (0 for the newest sweep, growing into the past).
        voxels: voxels made elsewhere, where the file held voxels.
        labels: boxes and class names, where the source has them.

    Raises:
        PointsError: both or neither of points and voxels, or arrays of another shape or type.

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
            _check(self.name, "labels.boxes", self.labels.boxes, np.float32, 7)
            if len(self.labels.boxes) != len(self.labels.names):
                raise PointsError(
                    f"{self.name}: {len(self.labels.boxes)} boxes but "
                    f"{len(self.labels.names)} class names"
                )

    def __len__(self) -> int:
        """Number of points, or of voxels where the frame holds voxels."""
        return len(self.points) if self.points is not None else len(self.voxels[0])  # type: ignore[index]


def _check(
    name: str, what: str, array: npt.NDArray[np.generic], dtype: type[np.generic], columns: int
) -> None:
    if array.ndim != 2 or array.shape[1] != columns or array.dtype != np.dtype(dtype):
        raise PointsError(
            f"{name}: {what} must be {np.dtype(dtype)} [N, {columns}], "
            f"not {array.dtype} {list(array.shape)}"
        )
