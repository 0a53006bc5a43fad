"""`bev_data.voxelize` under the name that it had here."""

from bev_data.voxelize import (
    Voxelization,
    VoxelizeError,
    Voxelizer,
    Voxels,
)

__all__ = [
    "Voxelization",
    "VoxelizeError",
    "Voxelizer",
    "Voxels",
]
