"""Points to voxels: cells of mit-bevfusion's grid and the mean of the points in each."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

__all__ = ["Voxelization", "VoxelizeError", "Voxelizer", "Voxels"]

_LOG = logging.getLogger(__name__)
_NUSCENES_SIZE = (0.075, 0.075, 0.2)
_NUSCENES_RANGE = (-54.0, -54.0, -5.0, 54.0, 54.0, 3.0)


class VoxelizeError(ValueError):
    """A point cloud, or a grid, that no voxels can be made of; the message says why."""


@dataclass(frozen=True, eq=False)
class Voxels:
    """Voxels of one frame, in the order of their first point; unpacks into the first three.

    Args:
        features: float32 [voxels, columns], mean over each voxel's first `max_num_points` points.
        coords: int32 [voxels, 4], batch, x, y, z as cell numbers.
        num_points: int32 [voxels], points in each mean.
        points_out_of_range: points outside the range, left out.
        points_over_limit: points of full voxels (beyond `max_num_points`), left out of the mean.
        voxels_dropped: voxels beyond `max_voxels`, left out.
        points_dropped: points of those voxels.

    Examples:
        >>> import numpy as np
        >>> found = Voxelizer()(np.zeros((12, 5), np.float32), batch=3)
        >>> features, coords, num_points = found
        >>> coords.tolist(), num_points.tolist(), found.points_over_limit
        ([[3, 720, 720, 25]], [10], 2)
    """

    features: Tensor
    coords: Tensor
    num_points: Tensor
    points_out_of_range: int
    points_over_limit: int
    voxels_dropped: int
    points_dropped: int

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.features, self.coords, self.num_points))

    def __len__(self) -> int:
        return len(self.features)


class _Assigned(NamedTuple):
    """Points as float32, the voxel of each (−1: out of range), the kept voxels' cells, how many."""

    rows: npt.NDArray[np.float32]
    voxel_of: npt.NDArray[np.int32]
    coords: npt.NDArray[np.int32]
    voxels: int


@dataclass(frozen=True)
class Voxelizer:
    """Hard voxelization with means, as mit-bevfusion's `Voxelization` and `voxelize_reduce`.

    The cell of a point is c = floor((p - range_min) / voxel_size), with p, range_min, voxel_size
    and both operations in float32, as upstream computes it. Points with c < 0 or c ≥ cells are
    left out, so a point on the upper bound is, and so is one within a rounding error below it:
    (53.999998 + 54) / 0.075 is 1440 in float32. Voxels stand in the order of their first point;
    the mean is summed in float64 in the order of the points and rounded once, so the result is
    the same, bit for bit, on every run and machine. Beyond `max_voxels` the first are kept, and
    the result tells how many were not (a warning is logged as well).

    Args:
        voxel_size: edges along x, y, z [m].
        point_cloud_range: x, y, z of the lower, then of the upper corner [m].
        max_num_points: points of a voxel that enter its mean, the first ones.
        max_voxels: most voxels of a frame.

    Raises:
        VoxelizeError: sizes, ranges or limits that make no grid; on a call: points that are no
            floating point [N, ≥ 3], none at all, NaN or Inf, or every point out of range.
    """

    voxel_size: Sequence[float] = _NUSCENES_SIZE
    point_cloud_range: Sequence[float] = _NUSCENES_RANGE
    max_num_points: int = 10
    max_voxels: int = 160000

    def __post_init__(self) -> None:
        _check_grid(self.voxel_size, self.point_cloud_range)
        for name in ("max_num_points", "max_voxels"):
            most = getattr(self, name)
            if not _is_count(most) or not most:
                raise VoxelizeError(f"{name}={most!r}: must be an integer from 1 to 2³¹ - 1")

    @property
    def grid_size(self) -> tuple[int, int, int]:
        """Cells along x, y, z: round((max - min) / voxel_size)."""
        x, y, z = _cells(self.voxel_size, self.point_cloud_range)
        return x, y, z

    @property
    def sparse_shape(self) -> tuple[int, int, int]:
        """Shape of the sparse tensor along x, y, z: mit-bevfusion adds one empty layer on top."""
        x, y, z = self.grid_size
        return x, y, z + 1

    def __call__(self, points: npt.NDArray[Any] | Tensor, batch: int = 0) -> Voxels:
        """Voxels of one frame.

        Args:
            points: [points, columns ≥ 3], the first three x, y, z [m]; a tensor or an array.
            batch: number of the frame in its batch, the first coordinate of every voxel.
        """
        from bev_data._voxel_hash import mean_features  # compiles late

        found = self._assign(points, batch)
        kept = len(found.coords)
        means, used, over_limit = mean_features(
            found.rows, found.voxel_of, kept, self.max_num_points
        )
        return Voxels(
            features=torch.from_numpy(means),
            coords=torch.from_numpy(found.coords),
            num_points=torch.from_numpy(used),
            points_out_of_range=int((found.voxel_of < 0).sum()),
            points_over_limit=int(over_limit),
            voxels_dropped=found.voxels - kept,
            points_dropped=int((found.voxel_of >= kept).sum()),
        )

    def group(
        self, points: npt.NDArray[Any] | Tensor, batch: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The first `max_num_points` points of each voxel themselves, in place of their mean.

        Args:
            points: As for a call.
            batch: Number of the frame in its batch.

        Returns:
            float32 [voxels, max_num_points, columns], zeros behind a voxel's points; int32
            [voxels, 4], batch, x, y, z; int32 [voxels], the points of each.

        Raises:
            VoxelizeError: As a call.

        Example:
            >>> import numpy as np
            >>> points = np.array([[0.01, 0, 0], [9, 0, 0], [0.02, 0, 0]], np.float32)
            >>> grouped, coords, count = Voxelizer(max_num_points=2).group(points)
            >>> grouped[:, :, 0].tolist(), count.tolist()
            ([[0.009999999776482582, 0.019999999552965164], [9.0, 0.0]], [2, 1])
        """
        found = self._assign(points, batch)
        kept = len(found.coords)
        order = np.argsort(found.voxel_of, kind="stable")
        voxel = found.voxel_of[order]
        place = np.arange(len(voxel)) - np.searchsorted(voxel, voxel)
        used = (voxel >= 0) & (voxel < kept) & (place < self.max_num_points)
        columns = found.rows.shape[1]
        grouped = np.zeros((kept, self.max_num_points, columns), np.float32)
        grouped[voxel[used], place[used]] = found.rows[order[used]]
        count = np.bincount(voxel[used], minlength=kept).astype(np.int32)
        return tuple(map(torch.from_numpy, (grouped, found.coords, count)))  # type: ignore[return-value]

    def _assign(self, points: npt.NDArray[Any] | Tensor, batch: int) -> _Assigned:
        """Index of each point's voxel. Refuses points that give no voxel."""
        from bev_data._voxel_hash import assign_voxels  # compiles late

        rows = _checked_rows(points)
        if not _is_count(batch):
            raise VoxelizeError(f"batch={batch!r}: must be an integer from 0 to 2³¹ - 1")
        low = np.asarray(self.point_cloud_range[:3], np.float32)
        size = np.asarray(self.voxel_size, np.float32)
        grid = np.asarray(self.grid_size, np.int64)
        table_bits = max(4, int(2 * len(rows)).bit_length())
        voxel_of, cells, found = assign_voxels(rows, low, size, grid, table_bits)
        if found == 0:
            raise VoxelizeError(
                f"all {len(rows)} points are outside the range {list(self.point_cloud_range)}; "
                f"they span {_span(rows)}: check the units and the sensor's axes"
            )
        kept = min(found, self.max_voxels)
        if found > kept:
            _LOG.warning(
                "%d voxels, but max_voxels is %d: the last %d, with %d points, are left out",
                found, kept, found - kept, int((voxel_of >= kept).sum()),
            )  # fmt: skip
        coords = np.full((kept, 4), batch, np.int32)
        coords[:, 1:] = cells[:kept]
        return _Assigned(rows, voxel_of, coords, found)


class Voxelization(nn.Module):
    """`Voxelizer` as the module that mit-bevfusion's tree has under `voxelize`.

    Args:
        voxel_size: edges along x, y, z [m].
        point_cloud_range: x, y, z of the lower, then of the upper corner [m].
        max_num_points: points of a voxel that enter its mean.
        max_voxels: most voxels of a frame, in training mode and in evaluation mode.
        deterministic: kept for its place in the printed tree; this one always is.

    Raises:
        VoxelizeError: as `Voxelizer`, and `deterministic=False`.

    Examples:
        >>> Voxelization(max_voxels=(120000, 160000)).sparse_shape
        (1440, 1440, 41)
    """

    def __init__(
        self,
        voxel_size: Sequence[float] = _NUSCENES_SIZE,
        point_cloud_range: Sequence[float] = _NUSCENES_RANGE,
        max_num_points: int = 10,
        max_voxels: tuple[int, int] | int = (120000, 160000),
        deterministic: bool = True,
    ) -> None:
        super().__init__()
        if not deterministic:
            raise VoxelizeError("deterministic=False: there is no other way here; leave it out")
        limits = (max_voxels, max_voxels) if isinstance(max_voxels, int) else tuple(max_voxels)
        if len(limits) != 2:
            raise VoxelizeError(f"max_voxels={max_voxels}: one number, or one for each mode")
        self.voxel_size = [float(edge) for edge in voxel_size]
        self.point_cloud_range = [float(bound) for bound in point_cloud_range]
        self.max_num_points = max_num_points
        self.max_voxels: tuple[int, int] = limits
        self.deterministic = deterministic
        self._voxelizers = tuple(
            Voxelizer(self.voxel_size, self.point_cloud_range, max_num_points, limit)
            for limit in limits
        )

    @property
    def grid_size(self) -> tuple[int, int, int]:
        """Cells along x, y, z."""
        return self._voxelizers[0].grid_size

    @property
    def sparse_shape(self) -> tuple[int, int, int]:
        """Shape of the sparse tensor along x, y, z: one layer more than there are cells."""
        return self._voxelizers[0].sparse_shape

    def forward(self, points: npt.NDArray[Any] | Tensor, batch: int = 0) -> Voxels:
        """Voxels of one frame; see `Voxelizer`."""
        return self._voxelizer(points, batch=batch)

    def group(
        self, points: npt.NDArray[Any] | Tensor, batch: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The points of each voxel of one frame; see `Voxelizer.group`."""
        return self._voxelizer.group(points, batch=batch)

    @property
    def _voxelizer(self) -> Voxelizer:
        return self._voxelizers[0 if self.training else 1]

    def extra_repr(self) -> str:
        """The settings, as mit-bevfusion prints them."""
        return (
            f"voxel_size={self.voxel_size}, point_cloud_range={self.point_cloud_range}, "
            f"max_num_points={self.max_num_points}, max_voxels={self.max_voxels}, "
            f"deterministic={self.deterministic}"
        )


def _cells(voxel_size: Sequence[float], bounds: Sequence[float]) -> list[int]:
    return [round((bounds[a + 3] - bounds[a]) / voxel_size[a]) for a in range(3)]


def _is_count(value: object) -> bool:
    return (
        type(value) is not bool and isinstance(value, int | np.integer) and 0 <= int(value) < 2**31
    )


def _check_grid(voxel_size: Sequence[float], bounds: Sequence[float]) -> None:
    try:
        numbers = [np.asarray(given, np.float64) for given in (voxel_size, bounds)]
    except (TypeError, ValueError, OverflowError):
        numbers = []
    if [array.shape for array in numbers] != [(3,), (6,)]:
        raise VoxelizeError(
            f"voxel_size={voxel_size!r} and point_cloud_range={bounds!r}: expected 3 edges and 6 "
            "bounds, all numbers"
        )
    if not np.isfinite(np.concatenate(numbers)).all() or min(voxel_size) <= 0:
        raise VoxelizeError(
            f"voxel_size={list(voxel_size)}, point_cloud_range={list(bounds)}: edges must be "
            "positive and every bound finite"
        )
    for axis, cells in zip("xyz", _cells(voxel_size, bounds), strict=True):
        place = "xyz".index(axis)
        extent = bounds[place + 3] - bounds[place]
        if cells < 1 or abs(extent / voxel_size[place] - cells) > 1e-3:
            raise VoxelizeError(
                f"the range along {axis}, {extent:g} m, is not a whole number of voxels of "
                f"{voxel_size[place]:g} m"
            )
        if cells > 2**21:  # three such axes still make a key below 2^63
            raise VoxelizeError(f"{cells} cells along {axis}: at most {2**21} are possible")


def _checked_rows(points: npt.NDArray[Any] | Tensor) -> npt.NDArray[np.float32]:
    if isinstance(points, Tensor):
        points = points.detach().cpu()  # numpy has no bfloat16
        points = (points.float() if points.dtype == torch.bfloat16 else points).numpy()
    try:
        array = np.asarray(points)
    except ValueError as error:  # rows of unequal length
        raise VoxelizeError(f"points are no array: {error}") from error
    if array.ndim != 2 or array.shape[1] < 3:
        raise VoxelizeError(
            f"points have shape {list(array.shape)}; expected [N, columns], the first three x, y, z"
        )
    if not np.issubdtype(array.dtype, np.floating):
        raise VoxelizeError(f"points are {array.dtype}; expected floating point numbers")
    if len(array) == 0:
        raise VoxelizeError("the point cloud is empty: there is nothing to voxelize")
    with np.errstate(over="ignore"):  # beyond float32 becomes Inf, refused just below
        rows = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(rows).all():
        bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        raise VoxelizeError(
            f"{len(bad)} of {len(rows)} points hold NaN or Inf, the first is row {bad[0]}: "
            f"{rows[bad[0]].tolist()}"
        )
    return rows


def _span(rows: npt.NDArray[np.float32]) -> str:
    low, high = rows[:, :3].min(axis=0), rows[:, :3].max(axis=0)
    return ", ".join(f"{a} {lo:.4g}..{hi:.4g}" for a, lo, hi in zip("xyz", low, high, strict=True))
