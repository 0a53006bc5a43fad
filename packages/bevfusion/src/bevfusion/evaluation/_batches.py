"""Frames as the model's arguments: made once each, on demand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves

from bev_data import InputError
from bev_data.boxes import Detections
from bev_data.cameras import CAMERA_NAMES, Camera, depth_images, order_cameras, prepare_cameras
from bev_data.points import Frame, Labels
from bev_data.voxelize import VoxelizeError
from bevfusion.evaluation._notes import FrameNote, PoorData, frame_findings, note_of, note_record
from bevfusion.model import Batch, Detector, Sizes
from bevquant_quantizers import CalibrationReport
from bevquant_quantizers.ranks import Record, Shards, current_ranks, in_order

# Bytes of finished batches that are kept; a voxel frame takes about 2 MB, six cameras 35 MB.
KEPT_BYTES = 200 * 2**20


class FrameBatches(Sequence[Batch]):
    """The frames of a sequence as batches of one; the first few are kept, others are made again.

    A model with a LiDAR branch gets voxels, one with a camera branch images, depth and cells. Parts
    of the frame that the model does not read are not made. A detector in its own code converts
    frames itself (`Detector.arguments`). Processes of one launcher
    (`bevquant_quantizers.ranks.launched`) share the notes about each frame.

    Args:
        frames: Any number; each is read when its batch is requested.
        config: Sizes.
        model: The model to run; its voxelizer and its view transform are used.
        cameras: Names of the cameras to use, in this order.

    Attributes:
        sizes: The given ones.
        advice: Remedy in errors; a program puts its own options in.

    Example:
        >>> import numpy as np
        >>> from bev_data.points import Frame
        >>> from bevfusion.model import CONFIGS, build_model
        >>> points = np.array([[10.0, 0.0, -1.0, 80.0, 0.0]], np.float32)
        >>> model = build_model(CONFIGS["tiny"], ("lidar",))
        >>> batches = FrameBatches([Frame("one", points)], CONFIGS["tiny"], model)
        >>> batches[0].coords.shape, batches.note(0).name, batches.note(0).findings[0].kind
        (torch.Size([1, 4]), 'one', 'few voxels')
    """

    advice: Mapping[str, str] = MappingProxyType(
        {
            "no cameras": "this model reads images: give frames with cameras, or build the model "
            "without its camera branch",
            "other cameras": "name the ones to use where a frame has fewer",
            "voxels alone": "give points, or build the model without its camera branch",
            "other grid": "choose the configuration they were made for, or give points",
        }
    )

    def __init__(
        self,
        frames: Sequence[Frame],
        config: Sizes,
        model: Detector,
        cameras: Sequence[str] = CAMERA_NAMES,
    ) -> None:
        self.names: dict[int, tuple[str, int]] = {}
        self._frames, self.sizes, self._cameras = frames, config, tuple(cameras)
        self._arguments: Callable[[Frame], Any] = model.arguments
        self._reads_all = not model.stages  # a network in other code may read any part of a frame
        self._count = len(frames)
        self._kept: dict[int, Any] = {}
        self._labels: dict[int, Labels | None] = {}
        self._findings: dict[int, tuple[PoorData, ...]] = {}
        self._last: tuple[int, Any] = (-1, None)
        self._first: Frame | None = None
        self._notes_shared = False
        parts = model.parts
        self._voxelize = model.lidar["voxelize"] if "lidar" in parts else None
        built: Any = model
        self._view: Any = built.camera["vtransform"] if "camera" in parts else None

    def head(self, count: int) -> Self:
        """The first `count` frames, sharing finished batches."""
        part = copy.copy(self)
        part._count = count
        return part

    @property
    def dataset(self) -> str | None:
        """Kind of the frames' data set, if they name one."""
        return getattr(self._frames, "kind", None)

    @property
    def first_frame(self) -> Frame:
        """The frame of the first batch."""
        if self._first is None:
            self._first = self._frames[0]
        return self._first

    def boxes(self, model: Detector, output: Any, batch: Any) -> Detections:
        """Boxes of a batch's frame, from the output of the model or another form of it.

        Args:
            model: Makes the boxes.
            output: Output for the batch.
            batch: The last requested one, or one that is kept.
        """
        return model.boxes(output, partial(self._frame_of, batch))

    def _frame_of(self, batch: Any) -> Frame:
        made = (*self._kept.items(), self._last)
        return self.frame(next(index for index, one in made if one is batch))

    def frame(self, index: int) -> Frame:
        """A frame; for a detector in other code with the named cameras alone."""
        frame = self.first_frame if index == 0 else self._frames[index]
        if self.sizes.kind == "foreign" and frame.cameras:  # its code reads all that it gets
            return replace(frame, cameras=self._named_cameras(frame))
        return frame

    def frame_labels(self, index: int) -> Labels | None:
        """Labels of a batch's frame, kept since the batch was made."""
        if index not in self._labels:
            self._labels[index] = self._frames[index].labels
        return self._labels[index]

    @property
    def frame_names(self) -> tuple[str, ...]:
        """Names of the frames made so far, in their order."""
        return tuple(name for _, (name, _) in sorted(self.names.items()))

    def listed(self) -> list[dict[str, Any]]:
        """Name and size of the frames made so far, for summary.json."""
        made = sorted(self.names.items())
        return [{"name": name, "size": size} for _, (name, size) in made]

    def note(self, index: int) -> FrameNote:
        """Name, size, labels and findings of a frame; its batch is made if it was not yet."""
        if index not in self.names:
            self[index]
        return FrameNote(*self.names[index], self._labels[index], self._findings[index])

    def share_notes(self, shards: Shards | None = None) -> None:
        """Share every frame's name, size and labels among all ranks.

        Args:
            shards: Storage of finished results.
        """
        if current_ranks().alone or self._notes_shared:
            return

        def record_of(index: int) -> Record:
            return note_record(self.note(index))

        for index, record in in_order("frame", len(self), record_of, shards):
            self.learn(index, note_of(record))
        self._notes_shared = True

    def learn(self, index: int, note: FrameNote) -> None:
        """Take another process's note about a frame, which is then not read here."""
        self.names[index] = note.name, note.size
        self._labels[index], self._findings[index] = note.labels, note.findings

    def used_cameras(self, frame: Frame) -> tuple[Camera, ...]:
        """The frame's cameras that the model reads, in its order.

        Raises:
            InputError: The frame lacks cameras.
        """
        if self._view is None:
            return tuple(frame.cameras or ()) if self._reads_all else ()
        if not frame.cameras:
            raise InputError(
                f"{frame.name}: the frame has no cameras, and {self.advice['no cameras']}"
            )
        return self._named_cameras(frame)

    def _named_cameras(self, frame: Frame) -> tuple[Camera, ...]:
        try:
            return order_cameras(frame.cameras, self._cameras)
        except InputError as error:
            raise InputError(f"{frame.name}: {error}; {self.advice['other cameras']}") from error

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Batch:  # type: ignore[override]
        if not 0 <= index < self._count:
            raise IndexError(index)
        current_ranks().check()  # where another process has ended, so does this one
        if index in self._kept:
            kept: Batch = self._kept[index]
            return kept
        frame = self.frame(index)
        batch = self._arguments(frame) or self._batch(frame)
        self.names[index] = (frame.name, len(frame))
        self._labels[index] = frame.labels
        reads_points = self._voxelize is not None
        self._findings[index] = frame_findings(frame, len(batch.coords)) if reads_points else ()
        # The first batches are kept, and one of them however large it is.
        if sum(map(_bytes, self._kept.values())) + _bytes(batch) <= KEPT_BYTES or not self._kept:
            self._kept[index] = batch
        self._last = index, batch
        return batch

    def __iter__(self) -> Iterator[Batch]:
        return (self[i] for i in range(len(self)))

    def _batch(self, frame: Frame) -> Batch:
        images = depth = cells = None
        cameras = self.used_cameras(frame)
        if cameras:
            if frame.points is None:
                raise InputError(
                    f"{frame.name}: the file holds voxels, and the camera branch wants the depth "
                    f"of single points: {self.advice['voxels alone']}"
                )
            sizes: Any = self.sizes
            size = sizes.camera.image_size
            try:
                inputs = prepare_cameras(cameras, size)
                geometry = (inputs.intrinsics, inputs.lidar_to_camera, inputs.image_aug)
                cells = self._view.cells(*(matrices[None] for matrices in geometry))
            except InputError as error:
                raise InputError(f"{frame.name}: {error}") from error
            images, depth = inputs.images[None], depth_images(frame.points, inputs, size)[None]
        features, coords = self._voxels(frame)
        return Batch(features, coords, 1, images, depth, cells)

    def _voxels(self, frame: Frame) -> tuple[torch.Tensor, torch.Tensor]:
        """Voxels of the frame, or voxels made of its points."""
        if self._voxelize is None:
            columns = self.sizes.lidar.in_channels
            return torch.zeros(0, columns), torch.zeros(0, 4, dtype=torch.int32)
        if frame.points is not None:
            try:
                features, coords, _ = self._voxelize(frame.points)
            except VoxelizeError as error:
                raise InputError(f"{frame.name}: {error}") from error
            return features, coords
        assert frame.voxels is not None
        features, coords = (torch.from_numpy(a) for a in frame.voxels)
        if self.sizes.lidar.reads_points:
            raise InputError(
                f"{frame.name}: the file holds voxels, and a pillar encoder reads single points: "
                "give points, or a model that reads voxels"
            )
        if len(features) == 0:
            raise InputError(f"{frame.name}: the file holds no voxels: there is nothing to run")
        _check_grid(frame.name, coords, self.sizes, self.advice["other grid"])
        return features, coords[:, [0, 3, 2, 1]] if self.sizes.lidar.zyx else coords


def _bytes(batch: Any) -> int:
    return sum(value.nbytes for value in tree_leaves(batch) if isinstance(value, torch.Tensor))


def _check_grid(name: str, coords: torch.Tensor, sizes: Sizes, advice: str) -> None:
    shape = sizes.lidar.sparse_shape
    extent = torch.tensor([1, *shape], dtype=coords.dtype)
    wrong = ((coords < 0) | (coords >= extent)).any(1)
    if bool(wrong.any()):
        row = coords[int(wrong.nonzero()[0])].tolist()
        raise InputError(
            f"{name}: {int(wrong.sum())} of {len(coords)} voxels lie outside the grid of config "
            f"{sizes.name!r}, {list(shape)} (x, y, z), such as batch, x, y, z = "
            f"{row}: the voxels were made for another grid; {advice}"
        )


def data_findings(
    batches: FrameBatches, count: int, report: CalibrationReport | None = None
) -> tuple[PoorData, ...]:
    """All findings about the first `count` frames, which set the ranges; frames first.

    A frame of few voxels among good frames adds little and forbids nothing.

    Args:
        batches: The frames.
        count: Number of calibration frames.
        report: Report of the calibration.
    """
    notes = [batches.note(index) for index in range(count)]
    every = [finding for note in notes for finding in note.findings]
    few = [finding for finding in every if finding.kind == "few voxels"]
    # Few voxels in some of the frames harm no range that others set.
    found = [f for f in every if f not in few]
    found += [replace(f, poor=len(few) == count) for f in few]
    whole = notes[0].name if count == 1 else f"all {count} frames"
    for item in report.findings if report is not None else ():
        at = whole if item.frame is None else notes[item.frame].name
        found.append(PoorData(**{**asdict(item), "frame": at}))
    return tuple(found)
