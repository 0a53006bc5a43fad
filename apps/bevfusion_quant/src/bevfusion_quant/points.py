"""`bev_data.points` under the name that it had here."""

from bev_data.points import (
    Frame,
    FrameFiles,
    Labels,
    PointsError,
    VoxelData,
    load_tensor,
    read_frames,
    read_points,
    save_tensor,
)

__all__ = [
    "Frame",
    "FrameFiles",
    "Labels",
    "PointsError",
    "VoxelData",
    "load_tensor",
    "read_frames",
    "read_points",
    "save_tensor",
]
