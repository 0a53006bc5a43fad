"""Frames for training in about a megabyte each, prepared by several processes, stored on disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from tqdm.auto import tqdm

from bev_data import InputError
from bev_data.cameras import (
    CAMERA_NAMES,
    IMAGE_MEAN,
    IMAGE_STD,
    depth_images,
    order_cameras,
    prepare_cameras,
)
from bev_data.points import Frame, Labels
from bevquant_quantizers.documents import (
    DocumentError,
    check_arrays,
    read_arrays,
    read_json,
    write_arrays,
    write_whole,
)

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
    # int16 reaches 131 m; points beyond are left out.
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


_INDEX = "frames.json"
_VERSION = 1
_CHUNK = 8


@dataclass(frozen=True)
class FrameSource:
    """Frames that another process can open too.

    Args:
        describe: Description that changes when the frames do.
        open: Opens them; can be pickled.
    """

    describe: str
    open: Callable[[], Sequence[Frame]]


class FrameForm(Protocol):
    """Form of prepared frames: sizes, pictures and cameras of the model to train."""

    @property
    def config(self) -> str:
        """Sizes of the model."""

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of the network's images; None without cameras."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the cameras, in this order."""


class PreparedFrames:
    """The frames of a folder, read one at a time.

    Args:
        folder: Folder of the frames.
        count: Number of frames.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self._count = folder, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> CompactFrame:
        return CompactFrame.load(_file(self.folder, index))


def prepare_frames(
    source: FrameSource, config: FrameForm, folder: Path, *, workers: int = 1
) -> PreparedFrames:
    """Prepare every frame of `source` that is not yet in `folder`.

    Ray casting and reading images take longer than a step of a small model; reading an .npz takes a
    millisecond. An interrupted preparation continues.

    Args:
        source: Frames to prepare.
        config: Provides the network's image size and cameras.
        folder: Created if missing; runs on the same frames may share it.
        workers: Processes beside this one; 0 prepares the frames in this process.

    Raises:
        InputError: The folder holds frames of another source or form, there are no frames, or a
            frame is unsuitable for training.
    """
    frames = source.open()
    if not len(frames):
        raise InputError(f"no frames to train on: {source.describe}")
    form = {
        "format": "bevfusion-quant prepared frames",
        "version": _VERSION,
        "source": source.describe,
        "count": len(frames),
        "image_size": None if config.image_size is None else list(config.image_size),
        "cameras": list(config.cameras) if config.image_size else [],
        "scan": config.config,
    }
    _claim(folder, form)
    missing = [i for i in range(len(frames)) if not _file(folder, i).is_file()]
    if missing:
        done = len(frames) - len(missing)
        with tqdm(total=len(frames), initial=done, desc="frames", disable=None) as bar:
            if workers < 1:
                for index in missing:
                    _make(frames, index, folder, config)
                    bar.update()
            else:
                _make_in_processes(source, missing, folder, config, workers, bar)
    return PreparedFrames(folder, len(frames))


def _claim(folder: Path, form: dict[str, object]) -> None:
    index = folder / _INDEX
    if not index.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise InputError(f"{folder} is not empty and holds no {_INDEX}: choose another --cache")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(index, json.dumps(form, indent=1))
        return
    try:
        found = read_json(index, dict[str, Any], what="list of prepared frames")
    except DocumentError as error:
        raise InputError(f"{error}: remove the folder") from error
    if found != form:
        differ = [key for key in form if found.get(key) != form[key]]
        differences = ", ".join(f"{key} {found.get(key)!r}, not {form[key]!r}" for key in differ)
        raise InputError(f"{folder} holds other frames ({differences}): choose another --cache")


def _make_in_processes(
    source: FrameSource,
    missing: list[int],
    folder: Path,
    config: FrameForm,
    workers: int,
    bar: tqdm[None],
) -> None:
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads half
    chunks = [missing[i : i + _CHUNK] for i in range(0, len(missing), _CHUNK)]
    with ProcessPoolExecutor(
        min(workers, len(chunks)), mp_context=context, initializer=_end_with_parent
    ) as pool:
        futures: list[Future[int]] = [
            pool.submit(_make_chunk, source, chunk, folder, config) for chunk in chunks
        ]
        try:
            for future in as_completed(futures):
                bar.update(future.result())
        except BrokenProcessPool as error:
            raise InputError(
                "a process that prepares frames was killed, probably because memory ran out: run "
                "the command again with fewer --workers; it continues with the finished frames"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """End a worker when the process that started it was killed."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _make_chunk(source: FrameSource, chunk: list[int], folder: Path, config: FrameForm) -> int:
    # Many processes run side by side.
    torch.set_num_threads(1)
    frames = source.open()
    for index in chunk:
        _make(frames, index, folder, config)
    return len(chunk)


def _make(frames: Sequence[Frame], index: int, folder: Path, config: FrameForm) -> None:
    prepared = compact(frames[index], config.image_size, config.cameras)
    prepared.save(_file(folder, index))


def _file(folder: Path, index: int) -> Path:
    return folder / f"{index:06d}.npz"
