"""KITTI's object detection frames: velodyne, image_2, calib, label_2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from bev_data._errors import InputError
from bev_data._motion import FROM_FORWARD_X, inverse
from bev_data.boxes import count_inside
from bev_data.cameras import Camera
from bev_data.datasets._frame_list import (
    FrameList,
    WhichCameras,
    check_which,
    one_folder,
    with_cameras,
)
from bev_data.datasets._image import read_camera
from bev_data.datasets._names import KITTI_NAMES, translate
from bev_data.points import Frame, Labels, read_points
from bev_data.points._frame import rows_of

_VISIBILITY = {0: 1.0, 1: 0.6, 2: 0.2}  # KITTI gives a level, not a share; 3 is "unknown"
_Matrix = npt.NDArray[np.float64]


def kitti(path: Path, *, cameras: WhichCameras = "all") -> FrameList:
    """KITTI object detection frames, the left colour camera as "CAM_FRONT".

    KITTI's x forward, y left becomes x right, y forward; the origin stays the scanner's. Labels
    come from camera coordinates; they cover what the camera sees, not what is beside or behind.
    "DontCare" regions have no box in space and are left out. Occlusion levels 0, 1, 2 become
    visibilities 1, 0.6, 0.2, level 3 NaN.

    Args:
        path: the folder that holds `velodyne`, or one or two above it (`training`,
            `object/training`).
        cameras: see `open_dataset`.

    Raises:
        InputError: no such folders, frames without images, and at access whatever is damaged.
    """
    path = one_folder("kitti", path)
    check_which(cameras)
    root = next(
        (
            folder
            for folder in (path, path / "training", path / "object" / "training")
            if (folder / "velodyne").is_dir()
        ),
        None,
    )
    if root is None:
        raise InputError(
            f"{path}: no folder velodyne here nor in training/ nor in object/training/; name the "
            "folder that holds velodyne, image_2 and calib"
        )
    names = sorted(file.stem for file in (root / "velodyne").glob("*.bin"))
    if not names:
        raise InputError(f"{root / 'velodyne'}: holds no .bin files")
    lacking = {}
    for name in names:
        missing = [str(_image_path(root, name).relative_to(root))]
        missing.append(f"calib/{name}.txt")
        missing = [file for file in missing if not (root / file).is_file()]
        if missing:
            lacking[name] = ", ".join(missing)
    kept = with_cameras(root, names, lacking, cameras)
    with_labels = (root / "label_2").is_dir()

    def read(name: str) -> Frame:
        file = root / "velodyne" / f"{name}.bin"
        points = rows_of(read_points(file, columns=4, axes="forward,left,up"))
        if cameras == "none" and not with_labels:
            return Frame(name, points)
        values = _calibration(root / "calib" / f"{name}.txt")
        to_rectified = _four(values["R0_rect"]) @ _four(values["Tr_velo_to_cam"])
        to_rectified = to_rectified @ inverse(FROM_FORWARD_X)
        labels = None
        if with_labels:
            labels = _labels(root / "label_2" / f"{name}.txt", inverse(to_rectified), points)
        seen: tuple[Camera, ...] = ()
        if cameras != "none":
            picture = _image_path(root, name)
            seen = (camera_of("CAM_FRONT", picture, values["P2"], to_rectified),)
        return Frame(name, points, labels=labels, cameras=seen)

    return FrameList("kitti", kept, read)


vars(kitti)["camera_names"] = ("CAM_FRONT",)  # what `dataset_cameras` answers


def _image_path(root: Path, name: str) -> Path:
    jpeg = root / "image_2" / f"{name}.jpg"
    return jpeg if jpeg.is_file() else jpeg.with_suffix(".png")


def camera_of(name: str, image: Path, projection: _Matrix, to_rectified: _Matrix) -> Camera:
    """A camera by its projection matrix P = K [I | t] [3, 4] from the rectified frame.

    The camera stands at −t of that frame.

    Raises:
        InputError: K is singular, or the picture is unreadable.
    """
    intrinsics = projection[:, :3].copy()
    if abs(np.linalg.det(intrinsics)) < 1e-9:
        raise InputError(
            f"{image}: P2 or cam2img of its calibration is singular: "
            f"{projection.tolist()}; the calibration is missing or was never filled in"
        )
    beside = np.eye(4)
    beside[:3, 3] = np.linalg.solve(intrinsics, projection[:, 3])
    return read_camera(name, image, intrinsics, beside @ to_rectified)


def boxes_of_camera(rows: _Matrix, to_lidar: _Matrix) -> npt.NDArray[np.float32]:
    """Boxes in a camera's coordinates as boxes in those of the LiDAR.

    Args:
        rows: [n, 7], middle of the bottom x, y, z (y down), length, height, width, and the turn
            about y: a box of turn r points to (cos r, 0, −sin r).
        to_lidar: [4, 4], from the camera.
    """
    middle = rows[:, :3].copy()
    middle[:, 1] -= rows[:, 4] / 2
    turn = rows[:, 6]
    along = np.stack([np.cos(turn), np.zeros_like(turn), -np.sin(turn)], 1) @ to_lidar[:3, :3].T
    centres = middle @ to_lidar[:3, :3].T + to_lidar[:3, 3]
    yaw = np.arctan2(along[:, 1], along[:, 0])
    return np.column_stack([centres, rows[:, [3, 5, 4]], yaw]).astype(np.float32)


def _calibration(path: Path) -> dict[str, _Matrix]:
    shapes = {"P2": (3, 4), "R0_rect": (3, 3), "Tr_velo_to_cam": (3, 4)}
    if not path.is_file():
        raise InputError(f"{path}: no such file; a frame needs its calibration")
    found: dict[str, _Matrix] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, numbers = line.partition(":")
        if key.strip() in shapes:
            try:
                values = np.array(numbers.split(), np.float64)
                found[key.strip()] = values.reshape(shapes[key.strip()])
            except ValueError as error:
                raise InputError(f"{path}: {key.strip()} is no matrix ({error})") from error
    missing = [key for key in shapes if key not in found]
    if missing:
        raise InputError(f"{path}: no {', '.join(missing)}; the calibration is incomplete")
    for key, values in found.items():
        if not np.isfinite(values).all():
            raise InputError(f"{path}: {key} holds NaN or Inf")
    return found


def _four(values: _Matrix) -> _Matrix:
    result = np.eye(4)
    result[: values.shape[0], : values.shape[1]] = values
    return result


def _labels(path: Path, to_lidar: _Matrix, points: npt.NDArray[np.float32]) -> Labels:
    if not path.is_file():
        raise InputError(f"{path}: no such file; other frames have labels: add it")
    names, rows = [], []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: damaged, no text of labels: {error}; copy it again") from error
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields or fields[0] == "DontCare":
            continue
        try:
            rows.append([float(field) for field in fields[1:15]])
        except ValueError as error:
            raise InputError(f"{path}: line {number}: {error}") from error
        if len(rows[-1]) != 14:
            raise InputError(
                f"{path}: line {number} has {len(fields)} fields; expected a class and 14 numbers"
            )
        names.append(fields[0])
    values = np.array(rows, np.float64).reshape(-1, 14)
    # A line has height, width and length, then the middle of the bottom.
    boxes = boxes_of_camera(values[:, [10, 11, 12, 9, 7, 8, 13]], to_lidar)
    visibility = [_VISIBILITY.get(level, np.nan) for level in values[:, 1]]
    return Labels(
        boxes,
        translate(names, KITTI_NAMES),
        visibility=np.array(visibility, np.float32),
        num_points=count_inside(points, boxes),
    )
