"""nuScenes through its devkit: which samples there are, and each as a frame."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from bev_data._errors import InputError
from bev_data._motion import inverse, move_points, pose
from bev_data.cameras import CAMERA_NAMES, Camera
from bev_data.datasets._frame_list import FrameList, one_folder
from bev_data.datasets._image import read_camera
from bev_data.datasets._names import NUSCENES_NAMES, translate
from bev_data.points import Frame, Labels, read_points
from bev_data.points._frame import rows_of
from bevquant_quantizers.documents import DocumentError, Finite, Size, as_form

_Three = tuple[Finite, Finite, Finite]


class _Scene(msgspec.Struct):
    name: str
    first_sample_token: str


class _Category(msgspec.Struct):
    name: str


class _Sample(msgspec.Struct):
    data: dict[str, str]
    anns: list[str]
    next: str


class _Pose(msgspec.Struct):
    rotation: tuple[Finite, Finite, Finite, Finite]
    translation: _Three

    def __post_init__(self) -> None:
        if not any(self.rotation):
            raise ValueError("a rotation of length 0")


class _Sensor(_Pose):
    camera_intrinsic: list[_Three]


class _Recording(msgspec.Struct):
    calibrated_sensor_token: str
    ego_pose_token: str
    filename: Annotated[str, msgspec.Meta(pattern=r"^[^\x00]+$")]
    timestamp: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    channel: str
    width: Size
    height: Size
    prev: str


class _Annotation(_Pose):
    token: str
    size: _Three
    visibility_token: str
    category_name: str
    num_lidar_pts: Size


_ROWS = {
    "sample": _Sample, "ego_pose": _Pose, "calibrated_sensor": _Sensor, "sample_data": _Recording,
    "sample_annotation": _Annotation,
}  # fmt: skip

# What the devkit, which checks nothing, raises on damaged tables.
_DAMAGED = (AssertionError, OSError, ValueError, LookupError, TypeError, AttributeError,
            ArithmeticError, RecursionError)  # fmt: skip


class _Tables:
    """The devkit's tables; each row that is asked for is checked."""

    def __init__(self, devkit: Any, place: Path) -> None:
        self.devkit, self._place = devkit, place
        self.version, self.dataroot = devkit.version, devkit.dataroot
        self._check(devkit.scene, list[_Scene], "scene")
        self._check(devkit.sample, list[dict[str, Any]], "sample")
        self._check(devkit.category, list[_Category], "category")
        self.scene: list[dict[str, Any]] = devkit.scene
        self.category: list[dict[str, Any]] = devkit.category

    def get(self, table: str, token: str) -> dict[str, Any]:
        """A row of a table, of the form that is read."""
        try:
            row: dict[str, Any] = self.devkit.get(table, token)
        except _DAMAGED as error:
            raise self._error(f"{table}.json has no row {token!r} ({error!r})") from error
        self._check(row, _ROWS[table], table)
        return row

    def box_velocity(self, token: str) -> Any:
        """Of an annotation, by the rows before and behind it [m/s]."""
        try:
            return self.devkit.box_velocity(token)
        except _DAMAGED as error:
            raise self._error(f"no velocity of annotation {token} ({error!r})") from error

    def _check(self, value: Any, form: Any, table: str) -> None:
        where = f"{self._place / f'{table}.json'}"
        try:
            as_form(value, form, where=where, what=f"table of nuScenes' {table}")
        except DocumentError as error:
            raise InputError(str(error)) from error

    def _error(self, what: str) -> InputError:
        return InputError(f"{self._place}: {what}; unpack the data set's metadata again")


def nuscenes(
    path: Path,
    *,
    version: str = "v1.0-mini",
    split: str | None = None,
    scenes: Sequence[str] | None = None,
    sweeps: int = 10,
    cameras: Literal["all", "none"] = "all",
    classes: Mapping[str, str] | None = None,
) -> FrameList:
    """Keyframes of nuScenes with ten sweeps, six cameras and labels in the scanner's frame.

    Needs nuscenes-devkit (`pip install nuscenes-devkit`). As in mit-bevfusion: each
    earlier sweep goes through global coordinates into the keyframe's, without its points within
    1 m of the scanner in x and in y, with its lag as the fifth column; a camera's pose is that of
    its own exposure. Unlike there, a scene's first keyframes have fewer sweeps instead of copies.
    Boxes carry nuScenes' ten class names where they have one, velocities (NaN where nuScenes does
    not know), and the middle of their visibility level (0.2, 0.5, 0.7, 0.9).

    Args:
        path: the folder with `samples`, `sweeps` and the tables' folder.
        version: the tables' folder, such as "v1.0-trainval".
        split: of the devkit ("mini_val", "val", …) or of a `splits.json` beside the tables.
        scenes: names of scenes; with a split, those that are in both.
        sweeps: how many at most, the keyframe's own among them.
        cameras: "all" or "none".
        classes: names of classes instead of the ten, by the tables' categories or by the ten names,
            such as {"vehicle.emergency.police": "car", "bus": "truck"}.

    Raises:
        InputError: no devkit, no such folder, version, split, scene or class, damaged tables, and
            at access a missing file or camera.
    """
    path = one_folder("nuscenes", path)
    if sweeps < 1:
        raise InputError(f"sweeps={sweeps}: at least 1, the keyframe itself")
    if cameras not in ("all", "none"):
        raise InputError(f"cameras={cameras!r}: expected 'all' or 'none'")
    tables = _tables(path, version)
    wanted = _scenes(tables, split, scenes)
    categories = [row["name"] for row in tables.category]
    names = dict(
        zip(categories, translate(categories, NUSCENES_NAMES, classes, version), strict=True)
    )
    keys = []
    for scene in wanted:
        token, number = scene["first_sample_token"], 0
        while token:
            if number > len(tables.devkit.sample):
                raise InputError(f"{path / version}: the samples of {scene['name']} have no end")
            keys.append((f"{scene['name']}_{number:02d}", token))
            token, number = tables.get("sample", token)["next"], number + 1
    if not keys:
        raise InputError(f"{path}: {version} holds no samples of the scenes asked for")

    def read(key: tuple[str, str]) -> Frame:
        return read_sample(tables, *key, sweeps=sweeps, with_cameras=cameras == "all", names=names)

    return FrameList("nuscenes", tuple(keys), read)


def _tables(path: Path, version: str) -> _Tables:
    try:
        devkit = importlib.import_module("nuscenes.nuscenes")
    except ImportError as error:
        raise InputError(
            f"nuScenes is read with nuscenes-devkit, which cannot be imported ({error}): install "
            "it with `pip install nuscenes-devkit`"
        ) from error
    if not (path / version).is_dir():
        there = sorted(folder.name for folder in path.glob("v*") if folder.is_dir())
        raise InputError(
            f"{path / version}: no such folder of tables; {path} has {', '.join(there) or 'none'}"
        )
    try:
        tables = devkit.NuScenes(version=version, dataroot=str(path), verbose=False)
    except _DAMAGED as error:
        raise InputError(
            f"{path / version}: the devkit cannot read the tables "
            f"({type(error).__name__}: {error}); unpack the data set's metadata and maps again"
        ) from error
    return _Tables(tables, path / version)


def _scenes(
    tables: _Tables, split: str | None, names: Sequence[str] | None
) -> list[dict[str, Any]]:
    there = {scene["name"]: scene for scene in tables.scene}
    missing = [name for name in names or () if name not in there]
    if missing:
        raise InputError(
            f"no scene {', '.join(missing)}; {tables.version} has {len(there)}, such as "
            f"{', '.join(sorted(there)[:5])}"
        )
    chosen = list(there) if names is None else list(names)
    if split is not None:
        inside = _split(tables, split)
        chosen = [name for name in chosen if name in inside]
        if not chosen:
            raise InputError(
                f"split {split!r} has none of the scenes of {tables.version}: another version "
                "may be meant (mini_train and mini_val are v1.0-mini's)"
            )
    return [there[name] for name in chosen]


def _split(tables: _Tables, split: str) -> set[str]:
    splits = importlib.import_module("nuscenes.utils.splits")
    known: dict[str, list[str]] = splits.create_splits_scenes()
    if split in known:
        return set(known[split])
    try:
        return set(splits.get_scenes_of_custom_split(split, tables.devkit))
    except _DAMAGED as error:
        raise InputError(
            f"no split {split!r} ({error}); the devkit knows {', '.join(known)}"
        ) from error


_NEAR = 1.0
_VISIBILITY = {"1": 0.2, "2": 0.5, "3": 0.7, "4": 0.9}  # levels 0-40, 40-60, 60-80, 80-100 %
_Matrix = npt.NDArray[np.float64]


def read_sample(
    tables: Any,
    name: str,
    token: str,
    *,
    sweeps: int,
    with_cameras: bool,
    names: Mapping[str, str] = NUSCENES_NAMES,
) -> Frame:
    """The frame of a sample.

    Args:
        tables: a `nuscenes.NuScenes`.
        name: of the frame.
        token: of the sample.
        sweeps: how many at most.
        with_cameras: whether images are read.
        names: of classes, by category.

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
        labels=_labels(tables, sample, from_global, names),
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
        motion = from_global @ _to_global(tables, record) if clouds else None
        lag = (keyframe["timestamp"] - record["timestamp"]) * 1e-6
        clouds.append(read_sweep(file, motion, lag, columns=5, dtype="float32"))
        if len(clouds) == sweeps or not record["prev"]:
            return np.concatenate(clouds)
        record = tables.get("sample_data", record["prev"])


def read_sweep(
    file: Path, motion: _Matrix | None, lag: float, **options: Any
) -> npt.NDArray[np.float32]:
    """Points of a sweep in the keyframe, with one lag [s].

    Args:
        file: of the sweep.
        motion: into the keyframe; None for the keyframe's own points. Others lose their points
            within 1 m of the scanner in x and in y.
        lag: of the sweep.
        options: keyword arguments of `read_points`.
    """
    points = rows_of(read_points(file, **options))
    if motion is not None:
        near = (np.abs(points[:, :2]) < _NEAR).all(axis=1)
        points = move_points(points[~near], motion)
    points[:, 4] = lag
    return points


def _camera(tables: Any, record: dict[str, Any], from_global: _Matrix) -> Camera:
    sensor = tables.get("calibrated_sensor", record["calibrated_sensor_token"])
    return read_camera(
        record["channel"],
        Path(tables.dataroot) / record["filename"],
        np.array(sensor["camera_intrinsic"], np.float64),
        inverse(from_global @ _to_global(tables, record)),
        (record["width"], record["height"]),
    )


def _labels(
    tables: Any, sample: dict[str, Any], from_global: _Matrix, names: Mapping[str, str]
) -> Labels:
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
        translate((annotation["category_name"] for annotation in found), names),
        velocities,
        np.array(visibility, np.float32),
        np.array([annotation["num_lidar_pts"] for annotation in found], np.int32),
    )
