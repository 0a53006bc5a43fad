"""Which cell of the bird's-eye view each point of the cameras' frustums lies in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bev_data import InputError

if TYPE_CHECKING:
    from bevfusion.model._config import CameraConfig

__all__ = ["frustum_cells", "frustum_points", "grid_of"]


def grid_of(config: CameraConfig) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """Cell sizes and centres of the first cells [m], float32 [3] each, and cells along x, y, z.

    Raises:
        InputError: A bound does not hold a whole number of cells.
    """
    bounds = {"xbound": config.xbound, "ybound": config.ybound, "zbound": config.zbound}
    counts = []
    for name, (low, high, step) in bounds.items():
        cells = (high - low) / step if step > 0 else 0.0
        if round(cells) < 1 or abs(cells - round(cells)) > 1e-6 * cells:
            raise InputError(
                f"{name} {(low, high, step)} holds {cells} cells: give low edge, high edge and "
                "cell size in metres so that a whole number of cells fits"
            )
        counts.append(round(cells))
    size = torch.tensor([step for _, _, step in bounds.values()])
    first = torch.tensor([low + step / 2.0 for low, _, step in bounds.values()])
    return size, first, (counts[0], counts[1], counts[2])


def frustum_points(config: CameraConfig) -> Tensor:
    """The points that the depth distribution spans, the same for every camera.

    Returns:
        float32 [depth bins, feature height, feature width, 3]: u right and v down in pixels of the
        network's image, from the first to the last pixel in equal steps, and depth in metres.
    """
    height, width = config.image_size
    rows, columns = config.feature_size
    depths = torch.arange(*config.dbound, dtype=torch.float32)
    u = torch.linspace(0, width - 1, columns)
    v = torch.linspace(0, height - 1, rows)
    d, v, u = torch.meshgrid(depths, v, u, indexing="ij")
    return torch.stack((u, v, d), -1)


def frustum_cells(
    frustum: Tensor,
    size: Tensor,
    first: Tensor,
    counts: tuple[int, int, int],
    calibration: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Flat cell of every frustum point of every camera.

    A point (u, v, d) lies at d · R⁻¹K⁻¹(u', v', 1) + t in the LiDAR's frame, with (u', v') the
    pixel before image augmentation. Its index along an axis is (p − low) / size, cut towards zero
    as mit-bevfusion cuts it: the first cell along each axis also holds what lies up to one cell
    below the map. Along z, where the one cell is 20 m high, those are points down to 30 m below
    the LiDAR, so trained weights depend on it. All in the calibration's precision.

    Args:
        frustum: From `frustum_points`.
        size: Cell sizes [m], float [3].
        first: Centres of the first cells [m], float [3].
        counts: Cells along x, y and z.
        calibration: Intrinsics [batch, cameras, 3, 3], LiDAR to camera [batch, cameras, 4, 4],
            image augmentation [batch, cameras, 3, 3].

    Returns:
        int64 [batch · cameras · depth bins · rows · columns]: ((b·Z + z)·X + x)·Y + y, or −1.

    Raises:
        InputError: Misshapen, non-finite or singular calibration, or a camera that sees none of
            the map.
    """
    _check_shapes(*calibration)
    intrinsics, lidar_to_camera, image_aug = (m.to(frustum.device) for m in calibration)
    dtype = torch.promote_types(intrinsics.dtype, lidar_to_camera.dtype)
    batch, cameras = intrinsics.shape[:2]
    to_lidar = _inverse(lidar_to_camera.to(dtype), "lidar_to_camera")
    to_ray = to_lidar[..., :3, :3] @ _inverse(intrinsics.to(dtype), "intrinsics")
    to_pixel = _inverse(image_aug.to(dtype), "image_aug")
    pixels = frustum[0, :, :, :2].to(dtype).reshape(-1, 2)
    pixels = torch.cat((pixels, torch.ones_like(pixels[:, :1])), 1)
    depths = frustum[:, 0, 0, 2].to(dtype)[:, None]
    size = size.to(frustum.device, dtype)
    low = first.to(frustum.device, dtype) - size / 2
    cells = []
    for b in range(batch):
        for n in range(cameras):  # one at a time: what a camera needs stays in the cache
            rays = pixels @ (to_ray[b, n] @ to_pixel[b, n]).T
            inside, flat = _indices(rays, depths, to_lidar[b, n, :3, 3], low, size, counts)
            if not bool(inside.any()):
                raise InputError(
                    f"camera {n} in frame {b} sees no cell of the map: check that translations "
                    "are in metres, focal lengths in pixels, and that lidar_to_camera maps LiDAR "
                    "points to the camera and not back"
                )
            cells.append(flat.add_(b * math.prod(counts)).masked_fill_(~inside, -1).reshape(-1))
    return torch.cat(cells)


def _indices(
    rays: Tensor,
    depths: Tensor,
    origin: Tensor,
    low: Tensor,
    size: Tensor,
    counts: tuple[int, int, int],
) -> tuple[Tensor, Tensor]:
    """Whether each point [bins, pixels] lies in the map, and (z·X + x)·Y + y for those that do."""
    flat = torch.zeros(1, dtype=torch.int64, device=rays.device)
    inside = torch.ones(1, dtype=torch.bool, device=rays.device)
    for axis in (2, 0, 1):
        metres = (depths * rays[:, axis]).add_(origin[axis])
        index = metres.sub_(low[axis]).div_(size[axis]).trunc_()
        inside = inside & (index >= 0) & (index < counts[axis])
        flat = flat * counts[axis] + index.clamp_(0, counts[axis]).long()
    return inside, flat


def _check_shapes(intrinsics: Tensor, lidar_to_camera: Tensor, image_aug: Tensor) -> None:
    leading = intrinsics.shape[:2]
    wanted = {"intrinsics": (3, intrinsics), "lidar_to_camera": (4, lidar_to_camera)}
    wanted["image_aug"] = (3, image_aug)
    for name, (size, matrices) in wanted.items():
        shape = (*leading, size, size)
        if matrices.shape != shape or 0 in shape or not matrices.is_floating_point():
            raise InputError(
                f"{name} is {matrices.dtype} {list(matrices.shape)}: expected floating point "
                f"[batch, cameras, {size}, {size}] with the batch and cameras of the intrinsics, "
                f"{list(leading)}"
            )


def _inverse(matrices: Tensor, name: str) -> Tensor:
    if not bool(torch.isfinite(matrices).all()):
        raise InputError(f"{name} holds NaN or Inf: check the calibration of the frame")
    inverse: Tensor
    inverse, failed = torch.linalg.inv_ex(matrices)
    last_row = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)[-1]
    for wrong, why in (
        (failed != 0, "is singular and cannot be inverted"),
        (
            ((matrices[..., -1, :] - last_row).abs() > 1e-6).any(-1),
            f"must end with the row {last_row.int().tolist()}",
        ),
    ):
        if bool(wrong.any()):
            frame, camera = wrong.nonzero()[0].tolist()
            raise InputError(
                f"{name} of camera {camera} in frame {frame} {why}, got "
                f"{matrices[frame, camera].tolist()}: check the calibration"
            )
    return inverse
