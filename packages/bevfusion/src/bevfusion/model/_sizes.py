"""Whether the parts of a configuration fit each other, before a forward finds out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bev_data import InputError

if TYPE_CHECKING:
    from bevfusion.model._config import BEVFusionConfig, CameraConfig, LidarConfig

__all__ = ["camera_map", "check_sizes", "lidar_map"]

Map = tuple[int, int, int]


def lidar_map(config: LidarConfig) -> Map:
    """Channels and cells along x and y of the LiDAR branch's map.

    Each stage but the last ends in a convolution of kernel 3 and stride 2, n → ⌊(n + 2p − 3) / 2⌋
    + 1; the last one folds z by kernel 3 and stride 2 without padding.

    Example:
        >>> from bevfusion.model import CONFIGS
        >>> lidar_map(CONFIGS["nuscenes"].lidar)
        (256, 180, 180)
    """
    shape = list(config.sparse_shape)
    for paddings in config.encoder_paddings[:-1]:
        last = paddings[-1]
        padding = (last,) * 3 if isinstance(last, int) else last
        shape = [(n + 2 * p - 3) // 2 + 1 for n, p in zip(shape, padding, strict=True)]
    x, y, z = shape
    return config.output_channels * ((z - 3) // 2 + 1), x, y


def camera_map(config: CameraConfig) -> Map:
    """Channels and cells along x and y of the camera branch's map.

    Example:
        >>> from bevfusion.model import CONFIGS
        >>> camera_map(CONFIGS["nuscenes"].camera)
        (80, 180, 180)
    """
    x, y, z = (
        round((high - low) / step)
        for low, high, step in (config.xbound, config.ybound, config.zbound)
    )
    stride = config.downsample
    return config.out_channels * z, math.ceil(x / stride), math.ceil(y / stride)


def check_sizes(config: BEVFusionConfig, parts: tuple[str, ...]) -> None:
    """Refuse a configuration whose parts cannot read each other's maps.

    Args:
        config: Sizes.
        parts: Those that are built; the others' sizes do not matter.

    Raises:
        InputError: Two numbers that contradict each other, with where each comes from.
    """
    maps = {"camera": camera_map(config.camera), "lidar": lidar_map(config.lidar)}
    if "fuser" in parts:
        got = tuple(maps[sensor][0] for sensor in ("camera", "lidar"))
        _expect(config, "fuser.in_channels", config.fuser.in_channels, "the sensors' maps", got)
        _expect(config, "camera's map", maps["camera"][1:], "the LiDAR's", maps["lidar"][1:])
    if "decoder" not in parts:
        return
    decoder = config.decoder
    if "fuser" in parts:
        channels = config.fuser.out_channels
        _expect(config, "decoder.in_channels", decoder.in_channels, "the fused map", channels)
    cells = maps["lidar" if "lidar" in parts else "camera"][1:]
    total = math.prod(decoder.strides)
    if any(n % total for n in cells):
        raise InputError(
            f"config {config.name!r}: a map of {cells} cells does not divide by the decoder's "
            f"strides, {decoder.strides}: choose a grid whose cells are a multiple of {total}"
        )
    if "head" in parts:
        channels = sum(decoder.upsample_channels)
        _expect(config, "head.in_channels", config.head.in_channels, "the decoder's map", channels)
        _expect(config, "head.map_size", config.head.map_size, "the decoder's map", cells)


def _expect(config: BEVFusionConfig, name: str, said: object, source: str, got: object) -> None:
    if said != got:
        raise InputError(f"config {config.name!r}: {name} is {said}, {source} {got}: make them one")
