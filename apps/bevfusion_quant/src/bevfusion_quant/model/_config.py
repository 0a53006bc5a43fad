"""Sizes of the LiDAR branch: mit-bevfusion's own, and a small one for seconds-long runs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONFIGS", "LidarConfig"]

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class LidarConfig:
    """Voxel grid and channel widths of the LiDAR branch.

    Axes are in the order x, y, z everywhere. `voxel_size` and `point_cloud_range` are in metres
    (the range as x, y, z of the low corner, then of the high one). `sparse_shape` counts voxels;
    its z extent is one more than the range holds, as SECOND-style encoders have it.

    Every stage of `encoder_channels` is residual blocks followed by a stride-2 convolution, whose
    width and padding come last in the stage; the final stage has residual blocks alone.
    """

    name: str
    voxel_size: tuple[float, float, float]
    sparse_shape: Triple
    point_cloud_range: tuple[float, float, float, float, float, float] = (
        -54.0, -54.0, -5.0, 54.0, 54.0, 3.0,
    )  # fmt: skip
    max_num_points: int = 10
    max_voxels: tuple[int, int] = (120000, 160000)
    in_channels: int = 5
    base_channels: int = 16
    encoder_channels: tuple[tuple[int, ...], ...] = (
        (16, 16, 32), (32, 32, 64), (64, 64, 128), (128, 128),
    )  # fmt: skip
    encoder_paddings: tuple[tuple[int | Triple, ...], ...] = (
        (0, 0, 1), (0, 0, 1), (0, 0, (1, 1, 0)), (0, 0),
    )  # fmt: skip
    output_channels: int = 128


CONFIGS: dict[str, LidarConfig] = {
    "nuscenes": LidarConfig("nuscenes", (0.075, 0.075, 0.2), (1440, 1440, 41)),
    "tiny": LidarConfig(
        "tiny",
        (0.3, 0.3, 0.2),
        (360, 360, 41),
        base_channels=8,
        encoder_channels=((8, 8, 16), (16, 16, 32), (32, 32, 64), (64, 64)),
        output_channels=64,
    ),
}
