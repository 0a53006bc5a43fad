"""Frames become voxels: once each, and only when asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from bevfusion_quant._errors import InputError
from bevfusion_quant.ptq._compare import Batch
from bevfusion_quant.voxelize import VoxelizeError

if TYPE_CHECKING:
    from bevfusion_quant.model import LidarConfig
    from bevfusion_quant.points import Frame

__all__ = ["VoxelBatches", "voxels_of"]

KEPT = 16


def voxels_of(frame: Frame, config: LidarConfig, voxelize: Callable[..., Any]) -> Batch:
    """One frame as a batch of one: its own voxels, or its points put into voxels.

    Raises:
        InputError: No point in range, or voxels that are not of this configuration's grid.
    """
    if frame.points is not None:
        try:
            features, coords, _ = voxelize(frame.points)
        except VoxelizeError as error:
            raise InputError(f"{frame.name}: {error}") from error
        return Batch(features, coords, 1)
    assert frame.voxels is not None
    features, coords = (torch.from_numpy(a) for a in frame.voxels)
    if len(features) == 0:
        raise InputError(f"{frame.name}: the file holds no voxels: there is nothing to run")
    _check_grid(frame.name, coords, config)
    return Batch(features, coords, 1)


def _check_grid(name: str, coords: torch.Tensor, config: LidarConfig) -> None:
    extent = torch.tensor([1, *config.sparse_shape], dtype=coords.dtype)
    wrong = ((coords < 0) | (coords >= extent)).any(1)
    if bool(wrong.any()):
        row = coords[int(wrong.nonzero()[0])].tolist()
        raise InputError(
            f"{name}: {int(wrong.sum())} of {len(coords)} voxels lie outside the grid of config "
            f"{config.name!r}, {list(config.sparse_shape)} (x, y, z), such as batch, x, y, z = "
            f"{row}: "
            "the voxels were made for another grid; choose the --config they were made for, or "
            "give points"
        )


class VoxelBatches(Sequence[Batch]):
    """The frames of a sequence as batches of one; the first few are kept, the rest made anew."""

    def __init__(
        self, frames: Sequence[Frame], config: LidarConfig, voxelize: Callable[..., Any]
    ) -> None:
        self.names: dict[int, tuple[str, int]] = {}
        self._frames, self._config, self._voxelize = frames, config, voxelize
        self._count = len(frames)
        self._kept: dict[int, Batch] = {}

    def head(self, count: int) -> VoxelBatches:
        """The first `count` frames, sharing what is already made."""
        part = copy.copy(self)
        part._count = count
        return part

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Batch:  # type: ignore[override]
        if not 0 <= index < self._count:
            raise IndexError(index)
        if index in self._kept:
            return self._kept[index]
        frame = self._frames[index]
        batch = voxels_of(frame, self._config, self._voxelize)
        self.names[index] = (frame.name, len(frame))
        if len(self._kept) < KEPT:
            self._kept[index] = batch
        return batch

    def __iter__(self) -> Iterator[Batch]:
        return (self[i] for i in range(len(self)))
