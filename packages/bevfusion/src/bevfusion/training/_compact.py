"""A frame for training in about a megabyte: the model's inputs and the labels."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from bev_data import InputError
from bev_data.cameras import (
    CAMERA_NAMES,
    IMAGE_MEAN,
    IMAGE_STD,
    depth_images,
    order_cameras,
    prepare_cameras,
)
from bev_data.points import Labels
from bevquant_quantizers.documents import check_arrays, read_arrays, write_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bev_data.points import Frame

STEP = 0.004  # m: int16 then reaches 131 m


@dataclass(frozen=True, eq=False)
class CompactFrame:
    """One labelled frame, rounded: coordinates to 4 mm, intensity, lag and depth to float16.

    Attributes:
        name: Of the frame.
        xyz: int16 [points, 3], in steps of 4 mm.
        rest: float16 [points, 2]: intensity and time lag [s].
        boxes: float32 [objects, 7], as in `points.Labels`.
        names: Class of each box.
        velocities: float32 [objects, 2]; NaN where not known.
        num_points: int32 [objects]; −1 where not counted.
        images: uint8 [cameras, 3, height, width] at the network's size; no cameras without them.
        depth: float16 [cameras, 1, height, width] [m].
        calibration: float64 [3, cameras, 4, 4]: intrinsics and image augmentation, both in the
            upper left 3 × 3, and between them lidar_to_camera.
    """

    name: str
    xyz: npt.NDArray[np.int16]
    rest: npt.NDArray[np.float16]
    boxes: npt.NDArray[np.float32]
    names: tuple[str, ...]
    velocities: npt.NDArray[np.float32]
    num_points: npt.NDArray[np.int32]
    images: npt.NDArray[np.uint8]
    depth: npt.NDArray[np.float16]
    calibration: npt.NDArray[np.float64]

    @property
    def points(self) -> npt.NDArray[np.float32]:
        """float32 [points, 5], as in `points.Frame`."""
        return np.concatenate(
            [self.xyz.astype(np.float32) * np.float32(STEP), self.rest.astype(np.float32)], 1
        )

    @property
    def labels(self) -> Labels:
        """The labels of the frame."""
        counted = self.num_points if (self.num_points >= 0).all() else None
        return Labels(self.boxes, self.names, self.velocities, num_points=counted)

    def network_images(self) -> torch.Tensor:
        """float32 [cameras, 3, height, width], normalised as `prepare_cameras` does."""
        values = self.images.astype(np.float32)
        values /= 255
        values -= IMAGE_MEAN[:, None, None]
        values /= IMAGE_STD[:, None, None]
        return torch.from_numpy(values)

    def save(self, path: Path) -> None:
        """Write an .npz, whole or not at all."""
        write_arrays(path, {f.name: np.asarray(getattr(self, f.name)) for f in fields(self)})

    @classmethod
    def load(cls, path: Path) -> CompactFrame:
        """Read a file of `save`.

        Raises:
            InputError: The file is damaged, or no such frame.
        """
        try:
            values: dict[str, Any] = dict(
                read_arrays(path, [f.name for f in fields(cls)], what="prepared frame")
            )
            check_arrays(values, _FORMS, "prepared frame", f"{path}: ")
        except ValueError as error:
            raise InputError(f"{error}: remove it, and it is made anew") from error
        values |= {"name": str(values["name"]), "names": tuple(map(str, values["names"]))}
        return cls(**values)


_FORMS: dict[str, tuple[Any, tuple[int | str, ...]]] = {
    "name": ("U", ()),
    "names": ("Uf", ("objects",)),  # none are float64 [0]
    "xyz": (np.int16, ("points", 3)),
    "rest": (np.float16, ("points", 2)),
    "boxes": (np.float32, ("objects", 7)),
    "velocities": (np.float32, ("objects", 2)),
    "num_points": (np.int32, ("objects",)),
    "images": (np.uint8, ("cameras", 3, "height", "width")),
    "depth": (np.float16, ("cameras", 1, "height", "width")),
    "calibration": (np.float64, (3, "cameras", 4, 4)),
}


def compact(
    frame: Frame, image_size: tuple[int, int] | None, cameras: Sequence[str] = CAMERA_NAMES
) -> CompactFrame:
    """Reduce a frame to the data of training.

    Args:
        frame: With points and labels, and with cameras if `image_size` is given.
        image_size: Height and width of the network's images; None to leave the cameras out.
        cameras: Names of the cameras to keep, in this order.

    Raises:
        InputError: The frame has no labels, no points, or lacks a camera.
    """
    if frame.labels is None or frame.points is None:
        what = "labels" if frame.labels is None else "points, only voxels"
        raise InputError(f"{frame.name}: training needs labelled points, and it has no {what}")
    labels = frame.labels
    near = (np.abs(frame.points[:, :3]) < 32767 * STEP).all(1)
    points = frame.points[near]
    count = len(labels.boxes)
    height, width = image_size or (0, 0)
    images = np.zeros((0, 3, height, width), np.uint8)
    depth = np.zeros((0, 1, height, width), np.float16)
    calibration = np.zeros((3, 0, 4, 4))
    if image_size is not None:
        try:
            inputs = prepare_cameras(order_cameras(frame.cameras, cameras), image_size)
        except InputError as error:
            raise InputError(
                f"{frame.name}: {error}; --cameras names the ones to use where a frame has fewer"
            ) from error
        shown = inputs.images.numpy() * IMAGE_STD[:, None, None] + IMAGE_MEAN[:, None, None]
        images = np.rint(shown * 255).clip(0, 255).astype(np.uint8)
        depth = depth_images(points, inputs, image_size).numpy().astype(np.float16)
        calibration = np.tile(np.eye(4), (3, len(images), 1, 1))
        calibration[0, :, :3, :3] = inputs.intrinsics
        calibration[1] = inputs.lidar_to_camera
        calibration[2, :, :3, :3] = inputs.image_aug
    return CompactFrame(
        frame.name,
        np.rint(points[:, :3] / STEP).astype(np.int16),
        points[:, 3:5].astype(np.float16),
        labels.boxes,
        labels.names,
        np.full((count, 2), np.nan, np.float32) if labels.velocities is None else labels.velocities,
        np.full(count, -1, np.int32) if labels.num_points is None else labels.num_points,
        images,
        depth,
        calibration,
    )
