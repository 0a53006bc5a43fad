"""A frame of one's own: a folder with a points file, images and `calib.json`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from bev_data._errors import InputError
from bev_data._motion import axes_motion, inverse
from bev_data.cameras import Camera
from bev_data.datasets._image import read_camera
from bev_data.datasets._json_file import matrix, read_json
from bev_data.points import Frame, Labels, read_frames, read_points
from bev_data.points._frame import move_objects
from bevquant_quantizers.documents import Size, write_arrays, write_folder, write_whole

_FILE = "calib.json"


def is_frame_folder(path: Path) -> bool:
    """Whether `path` is a folder whose `calib.json` lists cameras."""
    return (path / _FILE).is_file() and "cameras" in read_json(path / _FILE)


def read_frame_folder(folder: Path, **options: Any) -> Frame:
    """The frame of a folder with a `calib.json` like this:

    ```json
    {
      "points": "points.npz",
      "cameras": [
        {
          "name": "CAM_FRONT",
          "image": "front.jpg",
          "width": 1600, "height": 900,
          "intrinsics": [[1266.4, 0, 816.3], [0, 1266.4, 491.5], [0, 0, 1]],
          "lidar_to_camera": [[1, 0, 0, 0], [0, 0, -1, -0.3], [0, 1, 0, -0.8], [0, 0, 0, 1]]
        }
      ],
      "labels": {
        "boxes": [[-2.1, 10.4, -0.9, 4.5, 1.9, 1.7, 1.57]],
        "names": ["car"],
        "velocities": [[0.0, 3.2]], "visibility": [0.9], "num_points": [211]
      }
    }
    ```

    Files are named relative to the folder, or absolutely. `points` is any file that
    `points.read_points` reads, and may be left out where the folder holds one such file. `width`
    and `height`, the image size that the intrinsics are for, may be left out and are checked where
    they are there. `labels` may be left out, and in it all but `boxes` and `names`; a null in
    velocities or visibility says that the value is not known. Frames, boxes and matrices are as in
    `points.Frame`, `points.Labels` and `cameras.Camera`, unless `axes` says otherwise of all three.

    Args:
        folder: the folder.
        options: keyword arguments of `points.read_points`.

    Raises:
        InputError: something is missing, unknown, damaged or impossible.
    """  # noqa: D415 (a file is shown)
    path = folder / _FILE
    data: _FrameData = read_json(path, _FrameData)
    points = data.points
    if points is None:
        # Voxels come as two files but are one frame, and `read_frames` knows that.
        found = read_frames(folder).paths
        if len(found) != 1:
            raise InputError(
                f"{path}: the folder holds {len(found)} points files "
                f'({", ".join(file.name for file in found)}); say which with "points"'
            )
        points = found[0].name
    frame = read_points(folder / points, **options)
    labels = frame.labels
    motion = axes_motion(options.get("axes", "right,forward,up"))
    if data.labels is not None:
        labels = _read_labels(path, data.labels)
        labels = labels if motion is None else move_objects(labels, motion)
    return Frame(
        folder.absolute().name,
        frame.points,
        frame.voxels,
        labels,
        tuple(_read_camera(folder, camera, motion) for camera in data.cameras),
    )


def write_frame_folder(folder: str | os.PathLike[str], frame: Frame) -> Path:
    """Write a frame in the form that `open_dataset("files", folder)` reads, without loss.

    Points go to `points.npz`, images to PNG files. The folder appears when all of it is written.

    Args:
        folder: where to; its parents are made.
        frame: with points.

    Returns:
        The folder.

    Raises:
        InputError: the folder is there already, or the frame holds voxels.

    Examples:
        >>> import tempfile
        >>> frame = Frame("two points", np.zeros((2, 5), np.float32))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     folder = write_frame_folder(f"{place}/frame", frame)
        ...     sorted(entry.name for entry in folder.iterdir())
        ['calib.json', 'points.npz']
    """
    final = Path(folder)
    if final.exists():
        raise InputError(f"{final}: exists already; choose another name or remove it")
    if frame.points is None:
        raise InputError(f"{frame.name}: the frame holds voxels; only points can be written")
    final.parent.mkdir(parents=True, exist_ok=True)
    with write_folder(final) as partial:
        write_arrays(partial / "points.npz", {"points": frame.points}, compress=True)
        values: dict[str, Any] = {"points": "points.npz", "cameras": []}
        for camera in frame.cameras:
            image = f"{camera.name}.png"
            Image.fromarray(camera.image).save(partial / image, compress_level=1)
            values["cameras"].append(
                {
                    "name": camera.name,
                    "image": image,
                    "width": camera.width,
                    "height": camera.height,
                    "intrinsics": camera.intrinsics.tolist(),
                    "lidar_to_camera": camera.lidar_to_camera.tolist(),
                }
            )
        if frame.labels is not None:
            values["labels"] = {
                key: list(part) if key == "names" else _nested(part)
                for key, part in frame.labels._asdict().items()
                if part is not None
            }
        write_whole(partial / _FILE, json.dumps(values, indent=1))
    return final


def _nested(array: npt.NDArray[Any]) -> list[Any]:
    """Nested lists with null for NaN, which JSON lacks."""
    values = array.astype(object)
    values[array != array] = None
    result: list[Any] = values.tolist()
    return result


class _CameraData(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    image: str
    intrinsics: Any
    lidar_to_camera: Any
    width: Size | None = None
    height: Size | None = None


class _LabelData(msgspec.Struct, forbid_unknown_fields=True):
    boxes: Any
    names: list[str]
    velocities: Any = None
    visibility: Any = None
    num_points: Any = None


class _FrameData(msgspec.Struct, forbid_unknown_fields=True):
    """`calib.json`."""

    cameras: list[_CameraData]
    points: str | None = None
    labels: _LabelData | None = None


def _read_camera(folder: Path, data: _CameraData, motion: npt.NDArray[np.float64] | None) -> Camera:
    where = f"{folder / _FILE}: {data.name}"
    pose = matrix(data.lidar_to_camera, 4, 4, f"{where}: lidar_to_camera")
    return read_camera(
        data.name,
        folder / data.image,
        matrix(data.intrinsics, 3, 3, f"{where}: intrinsics"),
        pose if motion is None else pose @ inverse(motion),
        None if data.width is None or data.height is None else (data.width, data.height),
    )


def _read_labels(path: Path, data: _LabelData) -> Labels:
    boxes = matrix(data.boxes, None, 7, f"{path}: labels: boxes").astype(np.float32)
    velocities = data.velocities
    if velocities is not None:
        velocities = matrix(velocities, None, 2, f"{path}: labels: velocities").astype(np.float32)
    row = {}
    for key, dtype in (("visibility", np.float32), ("num_points", np.int32)):
        values = getattr(data, key)
        if values is not None:
            what = f"{path}: labels: {key}"
            numbers = matrix([values], 1, len(boxes), what)[0]
            if dtype is np.int32 and not (np.abs(numbers) < 2**31).all():
                raise InputError(f"{what} must be whole numbers")
            row[key] = numbers.astype(dtype)
    return Labels(
        boxes, tuple(data.names), velocities, row.get("visibility"), row.get("num_points")
    )
