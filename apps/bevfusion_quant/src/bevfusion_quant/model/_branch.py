"""The LiDAR branch under the names that mit-bevfusion gives its modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from bevfusion_quant.voxelize import Voxelization

if TYPE_CHECKING:
    from bevfusion_quant.model._config import LidarConfig

__all__ = ["BEVFusion", "build_lidar_branch"]


class BEVFusion(nn.Module):
    """BEVFusion's LiDAR branch: `encoders.lidar.voxelize` and `encoders.lidar.backbone`.

    Called with voxels: features float [voxels, channels], coords int32 [voxels, 4] as batch, x, y,
    z, and the number of frames. It answers the bird's-eye-view map, float [batch, channels, x, y].
    """

    def __init__(self, voxelize: nn.Module, backbone: nn.Module) -> None:
        super().__init__()
        lidar = nn.ModuleDict({"voxelize": voxelize, "backbone": backbone})
        self.encoders = nn.ModuleDict({"lidar": lidar})

    @property
    def lidar(self) -> nn.ModuleDict:
        """The branch itself: voxelize and backbone."""
        lidar = self.encoders["lidar"]
        assert isinstance(lidar, nn.ModuleDict)
        return lidar

    def forward(self, features: Tensor, coords: Tensor, batch_size: int) -> Tensor:
        """Run the backbone."""
        bev: Tensor = self.lidar["backbone"](features, coords, batch_size)
        return bev


def build_lidar_branch(config: LidarConfig) -> BEVFusion:
    """A float LiDAR branch of the given sizes, in eval mode, that runs right on a CPU.

    The modules are spconv's own classes by name, so that the tree reads as mit-bevfusion's does;
    they run on bevquant_sparse's kernels, because spconv's CPU build gives wrong results on more
    than one thread.

    Raises:
        InputError: spconv is not installed.

    Example:
        >>> from bevfusion_quant.model import CONFIGS, build_lidar_branch
        >>> branch = build_lidar_branch(CONFIGS["tiny"].lidar)
        >>> sorted(name for name, _ in branch.lidar.named_children())
        ['backbone', 'voxelize']
    """
    from bevfusion_quant.model._encoder import SparseEncoder
    from bevquant_sparse import use_bevquant_kernels

    voxelize = Voxelization(
        voxel_size=list(config.voxel_size),
        point_cloud_range=list(config.point_cloud_range),
        max_num_points=config.max_num_points,
        max_voxels=config.max_voxels,
    )
    model = BEVFusion(voxelize, SparseEncoder(config))
    use_bevquant_kernels(model)
    return model.eval()
