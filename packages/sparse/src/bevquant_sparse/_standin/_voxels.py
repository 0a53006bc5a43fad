"""`spconv.pytorch.utils`: from points to voxels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__name__ = "spconv.pytorch.utils"


class PointToVoxel:
    """Groups points into voxels, in the order in which the voxels first occur.

    Args:
        vsize_xyz: Size of a voxel along x, y, z (or as many axes as there are).
        coors_range_xyz: Lower ends along x, y, z, then upper ends.
        num_point_features: Columns of the points; the coordinates come first.
        max_num_voxels: Voxels behind this number are dropped.
        max_num_points_per_voxel: Points of a voxel behind this number are dropped.
        device: Ignored: results are where the points are.

    Raises:
        ValueError: The range has not two ends for each axis.
    """

    def __init__(
        self,
        vsize_xyz: Sequence[float],
        coors_range_xyz: Sequence[float],
        num_point_features: int,
        max_num_voxels: int,
        max_num_points_per_voxel: int,
        device: object = None,
    ) -> None:
        self.ndim = len(vsize_xyz)
        if len(coors_range_xyz) != 2 * self.ndim:
            raise ValueError(
                f"PointToVoxel: expected {2 * self.ndim} ends of the range (all lower ones, then "
                f"all upper ones), got {list(coors_range_xyz)}"
            )
        low, high = list(coors_range_xyz[: self.ndim]), list(coors_range_xyz[self.ndim :])
        self.num_point_features = num_point_features
        self.max_num_voxels = max_num_voxels
        self.max_num_points_per_voxel = max_num_points_per_voxel
        # As spconv keeps them: z first.
        self.vsize = [float(v) for v in vsize_xyz][::-1]
        self.coors_range = [float(v) for v in low[::-1] + high[::-1]]
        ends = zip(low, high, vsize_xyz, strict=True)
        self.grid_size = [round((b - a) / size) for a, b, size in ends][::-1]

    def __call__(
        self, pc: Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Voxels of a point cloud.

        Args:
            pc: ``[points, num_point_features]``.
            clear_voxels: Ignored: empty places are always 0.
            empty_mean: Fill the empty places of a voxel with the mean of its points instead.

        Returns:
            ``[voxels, max_num_points_per_voxel, num_point_features]``, int32 coordinates
            ``[voxels, ndim]`` (z first), int32 number of points ``[voxels]``.
        """
        return self.generate_voxel_with_id(pc, clear_voxels, empty_mean)[:3]

    def generate_voxel_with_id(
        self, pc: Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same, and each point's voxel: int64 ``[points]``, −1 for a point of none."""
        if pc.ndim != 2 or pc.shape[1] != self.num_point_features:
            raise ValueError(
                f"PointToVoxel: expected points [points, {self.num_point_features}], got "
                f"{tuple(pc.shape)}"
            )
        voxel_of, coordinates = self._number(pc)
        inside = (voxel_of >= 0).nonzero().flatten()
        # Points of one voxel side by side, in their own order; then each one's place among them.
        points = inside[voxel_of[inside].argsort(stable=True)]
        counts = voxel_of[points].bincount(minlength=len(coordinates))
        starts = counts.cumsum(0) - counts
        place = torch.arange(len(points), device=pc.device) - starts[voxel_of[points]]
        kept = place < self.max_num_points_per_voxel
        points, place = points[kept], place[kept]
        counts = counts.clamp(max=self.max_num_points_per_voxel)
        voxels = pc.new_zeros(len(counts), self.max_num_points_per_voxel, pc.shape[1])
        voxels[voxel_of[points], place] = pc[points]
        if empty_mean:
            mean = voxels.sum(1, keepdim=True) / counts.view(-1, 1, 1)
            slots = torch.arange(self.max_num_points_per_voxel, device=pc.device)
            voxels = torch.where((slots < counts[:, None])[..., None], voxels, mean)
        return voxels, coordinates, counts.int(), voxel_of

    def _number(self, pc: Tensor) -> tuple[Tensor, Tensor]:
        """Each point's voxel (−1 for none), and the voxels' coordinates, z first."""
        low = pc.new_tensor(self.coors_range[: self.ndim])
        size = pc.new_tensor(self.vsize)
        grid = torch.tensor(self.grid_size, device=pc.device)
        at = ((pc[:, : self.ndim].flip(1) - low) / size).floor()
        rows = ((at >= 0) & (at < grid)).all(1).nonzero().flatten()
        at = at[rows].long()
        strides = [math.prod(self.grid_size[axis + 1 :]) for axis in range(self.ndim)]
        keys = (at * torch.tensor(strides, device=pc.device)).sum(1)
        unique, number = keys.unique(return_inverse=True)
        first = torch.full_like(unique, len(keys)).scatter_reduce(
            0, number, torch.arange(len(keys), device=pc.device), "amin"
        )
        order = first.argsort()[: self.max_num_voxels]
        renumbered = torch.full_like(unique, -1)
        renumbered[order] = torch.arange(len(order), device=pc.device)
        voxel_of = torch.full((pc.shape[0],), -1, dtype=torch.int64, device=pc.device)
        voxel_of[rows] = renumbered[number]
        return voxel_of, at[first[order]].int()


def gather_features_by_pc_voxel_id(
    seg_res_features: Tensor, pc_voxel_id: Tensor, invalid_value: float = 0
) -> Tensor:
    """Features of each point's voxel; ``invalid_value`` for a point of none."""
    out = seg_res_features.new_full(
        (pc_voxel_id.shape[0], *seg_res_features.shape[1:]), invalid_value
    )
    valid = pc_voxel_id >= 0
    out[valid] = seg_res_features[pc_voxel_id[valid]]
    return out
