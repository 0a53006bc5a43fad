"""mmdetection3d's info files, `*_infos_train.pkl`, of the form since version 1.1.

They are pickles of plain data, read by `read_plain_pickle`, which executes nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from bev_data._errors import InputError
from bev_data._motion import axes_motion, inverse, move_points
from bev_data.cameras import Camera
from bev_data.datasets._files import check_reading
from bev_data.datasets._frame_list import FrameList, WhichCameras, check_which, with_cameras
from bev_data.datasets._json_file import matrix
from bev_data.datasets._kitti import boxes_of_camera, camera_of
from bev_data.datasets._names import KITTI_NAMES, translate
from bev_data.datasets._nuscenes import read_sweep
from bev_data.points import Frame, Labels, read_points
from bev_data.points._frame import move_objects, rows_of
from bevquant_quantizers.documents import DocumentError, Finite, as_form, read_plain_pickle

_LOG = logging.getLogger(__name__)
_Matrix = npt.NDArray[np.float64]
_SLOW = 50_000_000  # bytes
_POINTS = ("", "samples/LIDAR_TOP", "sweeps/LIDAR_TOP", "points", "velodyne")
_VELODYNE = ("velodyne_reduced", "velodyne")  # KITTI's configurations read the camera's view alone


@dataclass(frozen=True)
class _Convention:
    """Points and boxes in the info files of a data set.

    Attributes:
        axes: Directions of x, y and z; empty where several are in use.
        origin: The point of a box at its z; empty where the file does not say it.
        camera: The camera whose coordinates boxes have; empty for those of the LiDAR.
        folders: The folder of each camera's pictures in training/ and testing/.
    """

    axes: str = ""
    origin: Literal["centre", "bottom", ""] = ""
    camera: str = ""
    folders: Mapping[str, str] = field(default_factory=dict)


_FORWARD = "forward,left,up"
_WAYMO = ("CAM_FRONT", "CAM_FRONT_LEFT", "CAM_FRONT_RIGHT", "CAM_SIDE_LEFT", "CAM_SIDE_RIGHT")
_CONVENTIONS = {
    "nuscenes": _Convention("right,forward,up", "centre"),
    "lyft": _Convention("", "centre"),
    "kitti": _Convention(_FORWARD, "bottom", "CAM2", {"CAM2": "image_2"}),
    "waymo": _Convention(
        _FORWARD, "bottom", folders={name: f"image_{i}" for i, name in enumerate(_WAYMO)}
    ),
}


class _Cloud(msgspec.Struct):
    lidar_path: str
    num_pts_feats: int | None = None
    lidar2sensor: Any = None


class _Sweep(msgspec.Struct):
    lidar_points: _Cloud
    timestamp: Finite


class _Image(msgspec.Struct):
    img_path: str | None = None
    cam2img: Any = None
    lidar2cam: Any = None


class _Instance(msgspec.Struct):
    bbox_3d: tuple[Finite, Finite, Finite, Finite, Finite, Finite, Finite]
    bbox_label_3d: int
    num_lidar_pts: int | None = None
    velocity: tuple[float, float] | None = None


class _Record(msgspec.Struct):
    lidar_points: _Cloud
    timestamp: Finite | None = None
    images: dict[str, Any] = {}
    lidar_sweeps: list[_Sweep] = []
    instances: list[_Instance] = []


def mmdet3d(
    path: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    cameras: WhichCameras = "all",
    sweeps: int = 10,
    classes: Mapping[str, str] | None = None,
    box_origin: Literal["centre", "bottom"] | None = None,
    **reading: Any,
) -> FrameList:
    """Frames of an info file of mmdetection3d: points with sweeps, cameras and labels.

    Sweeps are joined as in nuScenes': moved into the keyframe by `lidar2sensor`, without their
    points within 1 m of the scanner in x and in y, with their lag as the fifth column. Files are
    looked up below `root`: as the record names them, then by their name alone in samples/LIDAR_TOP,
    sweeps/LIDAR_TOP and points, and pictures in samples/CAMERA and images/CAMERA.

    Args:
        path: the info file.
        root: the folder of the data; by default the info file's.
        cameras: see `open_dataset`.
        sweeps: how many at most, the keyframe's own among them.
        classes: new names of classes, by the file's names.
        box_origin: whether z is of a box's centre or of its bottom; required for other data sets
            than nuScenes, Lyft, KITTI and Waymo.
        reading: keyword arguments of `points.read_points`; `axes` are those of points, boxes and
            `lidar2cam`, required for other data sets than nuScenes, KITTI and Waymo. The number of
            a `.bin`'s columns is in the file.

    KITTI's and Waymo's files lie in training/ or, if the info file's name has "test", in testing/;
    velodyne_reduced is preferred to velodyne. Waymo's sweeps are not joined, its intensities above
    1 are read as 1, and its elongation is not read.

    Raises:
        InputError: a file of another kind or of an older form, unknown options, frames without
            pictures, and at access whatever is damaged.
    """
    check_reading(reading)
    check_which(cameras)
    if sweeps < 1:
        raise InputError(f"sweeps={sweeps}: at least 1, the keyframe itself")
    if box_origin not in (None, "centre", "bottom"):
        raise InputError(f"box_origin={box_origin!r}: expected 'centre' or 'bottom'")
    file = _info_file(path)
    meta, records = _content(file)
    dataset = str(meta.get("dataset", "")).lower()
    folder = file.parent if root is None else Path(root)
    names = _class_names(file, meta, classes or {})
    convention = _convention(file, meta, dataset, box_origin)
    origin = box_origin or convention.origin
    axes = reading.pop("axes", None) or convention.axes
    if not axes:
        raise InputError(
            f"{file}: metainfo says dataset={dataset!r}, which does not tell its axes; say "
            f"axes='{_FORWARD}' (mmdetection3d's own for LiDAR) or axes='right,forward,up' "
            "(nuScenes')"
        )
    motion = axes_motion(axes)
    if dataset == "waymo":
        sweeps = 1
    labelled = any(isinstance(one, dict) and one.get("instances") for one in records)  # a test set?
    kept = [str(number) for number in range(len(records))]
    lacking: dict[str, str] = {}
    for number, record in zip(kept, records, strict=True) if cameras != "none" else ():
        images = record.get("images") if isinstance(record, dict) else None
        if not isinstance(images, dict) or not images:
            lacking[number] = "all images"
    kept = with_cameras(file, kept, lacking, cameras)

    def read(number: str) -> Frame:
        where = f"{file}: data_list[{number}]"
        try:
            record = as_form(records[int(number)], _Record, where=where, what="record of a frame")
        except DocumentError as error:
            raise InputError(str(error)) from error
        split = "testing" if "test" in file.stem else "training"
        places = (*_POINTS, *(f"{split}/{name}" for name in _VELODYNE))
        cloud = _find(folder, record.lidar_points.lidar_path, places)
        to_lidar = _to_lidar(where, record, convention.camera) if labelled else None
        labels = _labels(where, record.instances, names, origin, to_lidar) if labelled else None
        if dataset == "waymo":
            points = _waymo_points(cloud, reading)
        else:
            points = _points(where, folder, cloud, record, sweeps, reading)
        if motion is not None:
            points = move_points(points, motion)
            labels = labels and move_objects(labels, motion)
        seen: tuple[Camera, ...] = ()
        if cameras != "none":
            taken = {name: f"{split}/{path}" for name, path in convention.folders.items()}
            seen = tuple(
                _camera(where, folder, name, image, motion, taken.get(name, ""))
                for name, image in record.images.items()
                if isinstance(image, dict) and image.get("img_path")  # KITTI's have R0_rect beside
            )
        scene = cloud.name.partition("__")[0]  # nuScenes' name of a drive
        return Frame(f"{scene.partition('.')[0]}_{int(number):05d}", points, None, labels, seen)

    kind = dataset if dataset in ("nuscenes", "kitti") else "mmdet3d"  # with rules for labels
    return FrameList(kind, tuple(kept), read)


def _convention(
    file: Path, meta: Mapping[str, Any], dataset: str, box_origin: str | None
) -> _Convention:
    found = _CONVENTIONS.get(dataset, _Convention())
    if dataset == "waymo" and not str(meta.get("info_version", "")).startswith("mmdet3d_v1.4"):
        found = replace(found, camera="CAM_FRONT")  # as written before mmdetection3d 1.4
    if found.camera and box_origin == "centre":
        raise InputError(
            f"{file}: box_origin='centre': boxes of {dataset} are the camera's, with the middle of "
            "their bottom; leave it out"
        )
    return found


def _info_file(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(
            f"a data set of kind 'mmdet3d' is one info file (*_infos_*.pkl), not {path}"
        )
    file = Path(path)
    if file.is_dir():
        there = ", ".join(sorted(found.name for found in file.glob("*.pkl"))) or "no .pkl"
        raise InputError(f"{file}: a folder; give its info file (*_infos_*.pkl); it has {there}")
    return file


def _content(file: Path) -> tuple[dict[str, Any], list[Any]]:
    if file.is_file() and file.stat().st_size > _SLOW:
        _LOG.warning("%s: %d MB; reading takes a while", file, file.stat().st_size // 10**6)
    try:
        content = read_plain_pickle(file, "info file of mmdetection3d")
    except DocumentError as error:
        raise InputError(str(error)) from error
    old = isinstance(content, list) or (isinstance(content, dict) and "infos" in content)
    if old:
        raise InputError(
            f"{file}: the form of mmdetection3d before version 1.1, in which boxes have several "
            "conventions; convert it with mmdetection3d: python tools/dataset_converters/"
            f"update_infos_to_v2.py --dataset nuscenes --pkl-path {file} --out-dir converted"
        )
    fits = isinstance(content, dict) and isinstance(content.get("metainfo"), dict)
    if not fits or not isinstance(content.get("data_list"), list) or not content["data_list"]:
        raise InputError(
            f"{file}: expected a dict with metainfo and a list data_list of frames, as "
            "mmdetection3d's tools/create_data.py writes it"
        )
    return content["metainfo"], content["data_list"]


def _class_names(file: Path, meta: Mapping[str, Any], classes: Mapping[str, str]) -> dict[int, str]:
    """The name of each label; labels below 0 are not used."""
    found = meta.get("categories", meta.get("classes", meta.get("CLASSES", ())))
    if isinstance(found, list | tuple):
        found = {name: number for number, name in enumerate(found)}
    fits = isinstance(found, dict) and all(
        isinstance(name, str) and isinstance(number, int) for name, number in found.items()
    )
    if not fits:
        raise InputError(f"{file}: metainfo: categories is no dict of names and numbers")
    own = [name for name, number in found.items() if number >= 0]
    table = KITTI_NAMES if str(meta.get("dataset", "")).lower() in ("kitti", "waymo") else {}
    given = translate(own, table, classes, str(file))
    return dict(zip((found[n] for n in own), given, strict=True))


def _find(root: Path, name: str, folders: tuple[str, ...]) -> Path:
    bare = Path(name.replace("\\", "/")).name
    places = [root / name, *(root / folder / bare for folder in folders)]
    for place in places:
        if place.is_file():
            return place
    looked = ", ".join(str(place.parent) for place in dict.fromkeys(places))
    raise InputError(
        f"{bare}: no such file in {looked}; put the info file into the data's folder, or give that "
        "folder as root="
    )


def _points(
    where: str, root: Path, cloud: Path, record: _Record, sweeps: int, options: dict[str, Any]
) -> npt.NDArray[np.float32]:
    count = record.lidar_points.num_pts_feats
    reading = ({"columns": count} if count in (4, 5) else {}) | options
    earlier = record.lidar_sweeps[: sweeps - 1]
    points = rows_of(read_points(cloud, **reading))
    if not earlier:
        return points
    if record.timestamp is None:
        raise InputError(f"{where}: sweeps without the frame's timestamp; read with sweeps=1")
    points[:, 4] = 0
    clouds = [points]
    for number, sweep in enumerate(earlier):
        what = f"{where}: lidar_sweeps[{number}]"
        lag = record.timestamp - sweep.timestamp
        if not 0 <= lag <= 10:
            raise InputError(
                f"{what}: its lag is {lag:g} s; expected timestamps [s], 0 to 10 apart"
            )
        pose = matrix(sweep.lidar_points.lidar2sensor, 4, 4, f"{what}: lidar2sensor")
        file = _find(root, sweep.lidar_points.lidar_path, _POINTS)
        clouds.append(read_sweep(file, inverse(pose), lag, **reading))
    return np.concatenate(clouds)


def _waymo_points(cloud: Path, reading: dict[str, Any]) -> npt.NDArray[np.float32]:
    """Columns x, y, z, intensity (0 to 1, some beyond), elongation and a number."""
    points = rows_of(read_points(cloud, **({"columns": "x,y,z,-,-,-"} | reading)))
    if "columns" not in reading:
        points[:, 3] = 255 * np.fromfile(cloud, "<f4")[3::6].clip(0, 1)
    return points


def _pose(what: str, image: Any) -> tuple[_Image, _Matrix]:
    """A camera's record, and the motion from the LiDAR to it."""
    try:
        form = as_form(image, _Image, where=what, what="camera")
    except DocumentError as error:
        raise InputError(str(error)) from error
    return form, matrix(form.lidar2cam, 4, 4, f"{what}: lidar2cam")


def _camera(
    where: str, root: Path, name: str, record: Any, motion: _Matrix | None, folder: str
) -> Camera:
    what = f"{where}: images: {name}"
    image, pose = _pose(what, record)
    rows = np.asarray(matrix(image.cam2img, None, None, f"{what}: cam2img"))
    if min(rows.shape) < 3:
        raise InputError(f"{what}: cam2img is {list(rows.shape)}; expected [3, 3] or [4, 4]")
    places = (f"samples/{name}", f"images/{name}", "images", *filter(None, [folder]))
    picture = _find(root, str(image.img_path), places)
    pose = pose if motion is None else pose @ inverse(motion)
    projection = np.zeros((3, 4))
    projection[:, : rows.shape[1]] = rows[:3, :4]
    return camera_of(name, picture, projection, pose)


def _to_lidar(where: str, record: _Record, camera: str) -> _Matrix | None:
    """The motion from the camera whose coordinates boxes have; None for those of the LiDAR."""
    if not camera or not record.instances:
        return None
    return inverse(_pose(f"{where}: images: {camera}", record.images.get(camera, {}))[1])


def _labels(
    where: str, instances: list[_Instance], names: Mapping[int, str], origin: str,
    to_lidar: _Matrix | None,
) -> Labels:  # fmt: skip
    if instances and not origin:
        raise InputError(
            f"{where}: boxes without a known origin: say box_origin='bottom' (mmdetection3d's own "
            "for LiDAR boxes) or box_origin='centre'"
        )
    used = [one for one in instances if one.bbox_label_3d >= 0]
    unknown = [one.bbox_label_3d for one in used if one.bbox_label_3d not in names]
    if unknown:
        raise InputError(f"{where}: label {unknown[0]} is none of metainfo's {dict(names)}")
    boxes = np.array([one.bbox_3d for one in used], np.float64).reshape(-1, 7)
    if to_lidar is not None:
        boxes = boxes_of_camera(boxes, to_lidar).astype(np.float64)
    elif origin == "bottom":
        boxes[:, 2] += boxes[:, 5] / 2
    nothing = (np.nan, np.nan)
    return Labels(
        boxes.astype(np.float32),
        tuple(names[one.bbox_label_3d] for one in used),
        np.array([one.velocity or nothing for one in used], np.float32).reshape(-1, 2),
        num_points=_counts(used),
    )


def _counts(used: list[_Instance]) -> npt.NDArray[np.int32] | None:
    counts = [one.num_lidar_pts for one in used]
    if None in counts:
        return None
    return np.array(counts, np.int32)
