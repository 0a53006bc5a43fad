"""One keyframe of nuScenes: sweeps, cameras and boxes, all in the scanner's frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bev_data._errors import InputError
from bev_data.cameras import CAMERA_NAMES, Camera
from bev_data.datasets._image import read_camera
from bev_data.datasets._motion import inverse, move_points, pose
from bev_data.datasets._names import NUSCENES_NAMES, translate
from bev_data.points import Frame, Labels, read_points

__all__ = ["read_sample"]

_NEAR = 1.0
_VISIBILITY = {"1": 0.2, "2": 0.5, "3": 0.7, "4": 0.9}  # levels 0-40, 40-60, 60-80, 80-100 %
_Matrix = npt.NDArray[np.float64]


def read_sample(tables: Any, name: str, token: str, *, sweeps: int, with_cameras: bool) -> Frame:
    """The frame of a sample.

    Args:
        tables: a `nuscenes.NuScenes`.
        name: of the frame.
        token: of the sample.
        sweeps: how many at most.
        with_cameras: whether images are read.

    Raises:
        InputError: the sample lacks a sensor, or a file is missing or damaged.
    """
    sample = tables.get("sample", token)
    wanted = ("LIDAR_TOP", *(CAMERA_NAMES if with_cameras else ()))
    missing = [sensor for sensor in wanted if sensor not in sample["data"]]
    if missing:
        raise InputError(
            f"{name}: the sample has no {', '.join(missing)}; its tables list "
            f"{', '.join(sample['data'])}: unpack the full metadata, or read points alone "
            "(cameras='none')"
        )
    lidar = tables.get("sample_data", sample["data"]["LIDAR_TOP"])
    from_global = inverse(_to_global(tables, lidar))
    cameras: tuple[Camera, ...] = ()
    if with_cameras:
        cameras = tuple(
            _camera(tables, tables.get("sample_data", sample["data"][camera]), from_global)
            for camera in CAMERA_NAMES
        )
    return Frame(
        name,
        _points(tables, lidar, from_global, sweeps),
        labels=_labels(tables, sample, from_global),
        cameras=cameras,
    )


def _to_global(tables: Any, record: dict[str, Any]) -> _Matrix:
    """From the sensor's frame at its time to the world's."""
    sensor = tables.get("calibrated_sensor", record["calibrated_sensor_token"])
    car = tables.get("ego_pose", record["ego_pose_token"])
    return pose(car["rotation"], car["translation"]) @ pose(
        sensor["rotation"], sensor["translation"]
    )


def _points(
    tables: Any, keyframe: dict[str, Any], from_global: _Matrix, sweeps: int
) -> npt.NDArray[np.float32]:
    clouds: list[npt.NDArray[np.float32]] = []
    record = keyframe
    while True:
        file = Path(tables.dataroot) / record["filename"]
        if clouds and not file.is_file():
            raise InputError(f"{file}: no such sweep; unpack it, or read fewer with sweeps=1")
        points = read_points(file, columns=5, dtype="float32").points
        if points is None:
            raise InputError(f"{file}: holds voxels, not points")
        if clouds:
            near = (np.abs(points[:, :2]) < _NEAR).all(axis=1)
            points = move_points(points[~near], from_global @ _to_global(tables, record))
        points[:, 4] = (keyframe["timestamp"] - record["timestamp"]) * 1e-6
        clouds.append(points)
        if len(clouds) == sweeps or not record["prev"]:
            return np.concatenate(clouds)
        record = tables.get("sample_data", record["prev"])


def _camera(tables: Any, record: dict[str, Any], from_global: _Matrix) -> Camera:
    sensor = tables.get("calibrated_sensor", record["calibrated_sensor_token"])
    return read_camera(
        record["channel"],
        Path(tables.dataroot) / record["filename"],
        np.array(sensor["camera_intrinsic"], np.float64),
        inverse(from_global @ _to_global(tables, record)),
        (record["width"], record["height"]),
    )


def _labels(tables: Any, sample: dict[str, Any], from_global: _Matrix) -> Labels:
    found = [tables.get("sample_annotation", token) for token in sample["anns"]]
    turn = from_global[:3, :3]
    boxes = np.zeros((len(found), 7))
    velocities = np.zeros((len(found), 2), np.float32)
    for row, annotation in enumerate(found):
        motion = from_global @ pose(annotation["rotation"], annotation["translation"])
        width, length, height = annotation["size"]
        yaw = np.arctan2(motion[1, 0], motion[0, 0])
        boxes[row] = [*motion[:3, 3], length, width, height, yaw]
        velocities[row] = (turn @ tables.box_velocity(annotation["token"]))[:2]
    visibility = [_VISIBILITY.get(annotation["visibility_token"], np.nan) for annotation in found]
    return Labels(
        boxes.astype(np.float32),
        translate((annotation["category_name"] for annotation in found), NUSCENES_NAMES),
        velocities,
        np.array(visibility, np.float32),
        np.array([annotation["num_lidar_pts"] for annotation in found], np.int32),
    )
