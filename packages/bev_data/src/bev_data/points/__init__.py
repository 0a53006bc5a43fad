"""Readers of LiDAR frames: `.bin`, `.pcd`, `.npy`, `.npz`, `.feather`, `.tensor`, folders."""

from __future__ import annotations

from bev_data._motion import axes_motion
from bev_data.points._frame import Frame, Labels, PointsError, VoxelData, move_frame, move_objects
from bev_data.points._nvidia_tensor import load_tensor, save_tensor
from bev_data.points._read import FrameFiles, read_frames, read_points

__all__ = [
    "Frame",
    "FrameFiles",
    "Labels",
    "PointsError",
    "VoxelData",
    "axes_motion",
    "load_tensor",
    "move_frame",
    "move_objects",
    "read_frames",
    "read_points",
    "save_tensor",
]
