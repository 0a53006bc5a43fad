"""PandaSet sequences in compact form: one `.npz` a frame, `calib.json`, JPEGs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bev_data._errors import InputError
from bev_data._motion import FROM_FORWARD_X, inverse, move_boxes, move_points
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
from bev_data.datasets._json_file import matrix, read_json
from bev_data.datasets._names import PANDASET_NAMES, translate
from bev_data.points import Frame, Labels, read_points

# PandaSet has no cameras that look back to the sides; the ones to the sides are the nearest.
_CAMERAS = {
    "CAM_FRONT": "front_camera", "CAM_FRONT_RIGHT": "front_right_camera",
    "CAM_FRONT_LEFT": "front_left_camera", "CAM_BACK": "back_camera",
    "CAM_BACK_LEFT": "left_camera", "CAM_BACK_RIGHT": "right_camera",
}  # fmt: skip
_SIZE = (1920, 1080)


def pandaset(
    path: Path,
    *,
    images: str | Path | None = None,
    cameras: WhichCameras = "all",
    origin_height: float = 1.49,
) -> FrameList:
    """Frames of one PandaSet sequence, its six cameras under nuScenes' names.

    Expects `frame_NN.npz` (`points` [N, 5]: x forward, y left, z up [m], intensity, time ≤ 0 [s];
    `boxes` [M, 7]; `names` [M]) and `calib.json` (`intrinsics` with fx, fy, cx, cy by camera;
    `frames` with `cams`, each with the 4x4 `cam2ego`). PandaSet's own files are pickles, which are
    never loaded.

    x forward, y left becomes x right, y forward, for points, boxes and poses alike; time
    becomes the lag ≥ 0. The origin, at the height of the axles (0.35 m, as the road under the car
    shows), is lifted to where nuScenes' scanner is, 1.84 m above the road.

    Args:
        path: the folder of one sequence.
        images: the folder with `front_camera/NN.jpg`, …; by default `camera` in that folder or in
            the one beside it whose name lacks "_compact".
        cameras: see `open_dataset`.
        origin_height: of the frames' origin above PandaSet's [m].

    Raises:
        InputError: no frames, no calibration, frames without images, and at access whatever is
            damaged.
    """
    path = one_folder("pandaset", path)
    check_which(cameras)
    files = {file.stem.removeprefix("frame_"): file for file in sorted(path.glob("frame_*.npz"))}
    if not files:
        raise InputError(
            f"{path}: holds no frame_NN.npz; give the folder of a sequence in compact form"
        )
    calibration: dict[str, Any] = {}
    folder = path / "camera"
    lacking: dict[str, str] = {}
    if cameras != "none":
        calibration = read_json(path / "calib.json")
        folder = _image_folder(path, images)
        poses = _member(path, calibration, "frames")
        for name in files:
            wanted = [f"{own}/{name}.jpg" for own in _CAMERAS.values()]
            missing = [image for image in wanted if not (folder / image).is_file()]
            if missing:
                lacking[name] = ", ".join(missing)
            elif name not in poses:
                lacking[name] = f"a pose in {path / 'calib.json'}"
    kept = with_cameras(path, list(files), lacking, cameras)
    motion = FROM_FORWARD_X.copy()
    motion[2, 3] = -origin_height

    def read(name: str) -> Frame:
        frame = read_points(files[name])
        if frame.points is None or frame.labels is None:
            raise InputError(f"{files[name]}: expected points, boxes and names")
        points = move_points(frame.points, motion)
        boxes = move_boxes(frame.labels.boxes, motion)
        labels = Labels(
            boxes,
            translate(frame.labels.names, PANDASET_NAMES),
            num_points=count_inside(points, boxes),
        )
        seen: tuple[Camera, ...] = ()
        if cameras != "none":
            seen = tuple(
                _camera(path, calibration, folder, name, own, known, inverse(motion))
                for known, own in _CAMERAS.items()
            )
        return Frame(f"{path.name}_{name}", points, labels=labels, cameras=seen)

    return FrameList("pandaset", kept, read)


def _image_folder(path: Path, images: str | Path | None) -> Path:
    if images is not None:
        return Path(images)
    beside = path.absolute().parent / path.absolute().name.removesuffix("_compact") / "camera"
    return beside if not (path / "camera").is_dir() and beside.is_dir() else path / "camera"


def _member(path: Path, values: dict[str, Any], *keys: str) -> Any:
    found: Any = values
    for key in keys:
        if not isinstance(found, dict) or key not in found:
            raise InputError(f"{path / 'calib.json'}: no {' / '.join(keys)}")
        found = found[key]
    return found


def _camera(
    path: Path,
    calibration: dict[str, Any],
    folder: Path,
    frame: str,
    own: str,
    known: str,
    to_ego: Any,
) -> Camera:
    what = f"{path / 'calib.json'}: frame {frame}, {own}"
    row = matrix(
        [[_member(path, calibration, "intrinsics", own, key) for key in ("fx", "fy", "cx", "cy")]],
        1,
        4,
        f"{what}: fx, fy, cx, cy",
    )
    fx, fy, cx, cy = row[0]
    pose = matrix(
        _member(path, calibration, "frames", frame, "cams", own, "cam2ego"), 4, 4, f"{what}: pose"
    )
    return read_camera(
        known,
        folder / own / f"{frame}.jpg",
        np.array([[fx, 0.0, cx], [0.0, fy, cy], [0.0, 0.0, 1.0]]),
        inverse(pose) @ to_ego,
        _SIZE,
    )
