"""Points to pillars: their decoration, the encoder and the scatter to a map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, fx, nn

from bev_data.voxelize import Voxelization
from bevfusion.centerpoint._config import PillarConfig
from bevfusion.model import LidarConfig

fx.wrap("scatter")


class VoxelMeans(Voxelization):
    """mmdetection3d's hard voxelization and HardSimpleVFE: cells as batch, z, y, x, and means."""

    def __init__(self, config: LidarConfig | PillarConfig) -> None:
        super().__init__(
            config.voxel_size, config.point_cloud_range, config.max_num_points, config.max_voxels
        )

    def forward(self, points: npt.NDArray[Any] | Tensor, batch: int = 0) -> Any:
        """Float [voxels, columns], int32 [voxels, 4] as batch, z, y, x, and int32 [voxels]."""
        means, coords, count = super().forward(points, batch)
        return means, zyx(coords), count


class DecoratedPillars(VoxelMeans):
    """Points grouped by pillar and decorated: input of the pillar encoder."""

    def forward(self, points: npt.NDArray[Any] | Tensor, batch: int = 0) -> Any:
        """Float [pillars, points, columns + 6], int32 [pillars, 4], and int32 [pillars]."""
        grouped, coords, count = self.group(points, batch)
        coords = zyx(coords)
        decorated = decorate(grouped, count, coords, self.voxel_size, self.point_cloud_range)
        return decorated, coords, count


def zyx(coords: Tensor) -> Tensor:
    """Coordinates as batch, x, y, z in the order batch, z, y, x, or the other way round."""
    return coords[:, [0, 3, 2, 1]].contiguous()


def decorate(
    points: Tensor,
    num_points: Tensor,
    coords: Tensor,
    voxel_size: Sequence[float],
    point_cloud_range: Sequence[float],
) -> Tensor:
    """mmdetection3d's PillarFeatureNet up to its layers, with `legacy=False`.

    A point is followed by its offset from the mean of the pillar's points, and by its offset from
    the pillar's centre; empty places of a pillar are zeros. All in the points' precision.

    Args:
        points: float [pillars, points, columns], zeros behind the pillar's own points.
        num_points: int32 [pillars], at least 1.
        coords: int32 [pillars, 4]: batch, z, y, x.
        voxel_size: Along x, y, z [m].
        point_cloud_range: Low x, y, z, then high x, y, z [m].

    Returns:
        float [pillars, points, columns + 6].

    Example:
        >>> points = torch.tensor([[[0.5, 0.5, 0.0], [0.25, 0.5, 1.0], [0.0, 0.0, 0.0]]])
        >>> pillar = torch.tensor([[0, 0, 0, 0]])
        >>> bounds = [0.0, 0.0, -2.0, 8.0, 8.0, 2.0]
        >>> decorate(points, torch.tensor([2]), pillar, [1.0, 1.0, 4.0], bounds)[0, 1].tolist()
        [0.25, 0.5, 1.0, -0.125, 0.0, 0.5, -0.25, 0.0, 1.0]
    """
    xyz = points[:, :, :3]
    mean = xyz.sum(1, keepdim=True) / num_points.to(points).view(-1, 1, 1)
    low = [size / 2 + edge for size, edge in zip(voxel_size, point_cloud_range[:3], strict=True)]
    cells = coords[:, [3, 2, 1]].to(points)
    # From the lower edges to the centres.
    centre = cells * points.new_tensor(list(voxel_size)) + points.new_tensor(low)
    decorated = torch.cat([points, xyz - mean, xyz - centre[:, None]], -1)
    # Empty places would have offsets too.
    places = torch.arange(points.shape[1], device=points.device)
    return decorated * (places < num_points[:, None]).to(points)[..., None]


class PFNLayer(nn.Module):
    """mmdetection3d's PFNLayer: linear, batch norm, ReLU, and the largest value of a pillar.

    Args:
        in_channels: Columns of a point.
        out_channels: Channels of the result; half of them where `last` is false.
        last: Whether the largest values are the result, or follow each point's own.
    """

    def __init__(self, in_channels: int, out_channels: int, *, last: bool) -> None:
        super().__init__()
        units = out_channels if last else out_channels // 2
        self.norm = nn.BatchNorm1d(units, eps=1e-3, momentum=0.01)
        self.linear = nn.Linear(in_channels, units, bias=False)
        self.relu = nn.ReLU()
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        """Float [pillars, points, in] to float [pillars, 1 or points, out]."""
        # As rows: the batch norm then folds into the linear layer.
        rows = self.relu(self.norm(self.linear(x.flatten(0, 1))))
        rows = rows.view(x.shape[0], x.shape[1], rows.shape[1])
        best = rows.amax(1, keepdim=True)
        return best if self.last else torch.cat([rows, best.expand(-1, x.shape[1], -1)], 2)


class PillarFeatureNet(nn.Module):
    """mmdetection3d's PillarFeatureNet on decorated points, its parameters' names and shapes."""

    def __init__(self, config: PillarConfig) -> None:
        super().__init__()
        widths = (config.decorated_channels, *config.feat_channels)
        last = len(config.feat_channels) - 1
        self.pfn_layers = nn.ModuleList(
            PFNLayer(widths[i], widths[i + 1], last=i == last) for i in range(last + 1)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Float [pillars, points, columns] from `decorate` to float [pillars, channels]."""
        for layer in self.pfn_layers:
            features = layer(features)
        return features.squeeze(1)


class PointPillarsScatter(nn.Module):
    """mmdetection3d's PointPillarsScatter: each pillar's channels at its cell, zeros elsewhere."""

    def __init__(self, config: PillarConfig) -> None:
        super().__init__()
        x, y, _ = config.sparse_shape
        self.output_shape = (y, x)

    def forward(self, features: Tensor, coords: Tensor, batch_size: int) -> Tensor:
        """Float [pillars, channels], int32 [pillars, 4] to float [batch, channels, y, x]."""
        return scatter(features, coords, batch_size, self.output_shape)


def scatter(
    features: Tensor, coords: Tensor, batch_size: int, output_shape: tuple[int, int]
) -> Tensor:
    """`PointPillarsScatter` as a function; no cell twice."""
    y, x = output_shape
    batch, _, row, column = coords.long().unbind(1)
    canvas = features.new_zeros(batch_size * y * x, features.shape[1])
    canvas = canvas.index_copy(0, (batch * y + row) * x + column, features)
    return canvas.view(batch_size, y, x, -1).permute(0, 3, 1, 2).contiguous()
