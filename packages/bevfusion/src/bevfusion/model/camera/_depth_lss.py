"""Lift, splat: image features to the bird's-eye view, with the LiDAR's depth as a hint."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

from bev_data import InputError
from bevfusion.model.camera._bev_pool import lift_splat_pool

if TYPE_CHECKING:
    from bevfusion.model._config import CameraConfig

_STRIDE = 8  # of dtransform
_HINT_CHANNELS = 64


class DepthLSSTransform(nn.Module):
    """mit-bevfusion's DepthLSSTransform (Philion and Fidler 2020, with sparse depth as input).

    Per pixel of the feature map, depthnet gives a distribution over depth bins and a context
    vector; every frustum point weighs the context by its bin's probability, and each cell of the
    bird's-eye view sums the points that lie in it. `dtransform` brings the depth image to the
    feature map's size, `downsample` the pooled map to the LiDAR branch's.

    `dx`, `bx`, `nx` (cell sizes, centres of the first cells, numbers of cells) and `frustum` are
    parameters without gradient, as upstream, so that its checkpoints hold them.

    Raises:
        InputError: The configuration's stride is not 8, the images' size is no multiple of it, or
            `downsample` is neither 1 nor, with one cell along z, 2.
    """

    def __init__(self, config: CameraConfig) -> None:
        super().__init__()
        height, width = config.image_size
        if config.feature_stride != _STRIDE or height % _STRIDE or width % _STRIDE:
            raise InputError(
                f"images of {height}×{width} at feature stride {config.feature_stride}: the view "
                f"transform works at stride {_STRIDE}, so height and width must be multiples of it"
            )
        size, first, self.counts = grid_of(config)
        self.dx = nn.Parameter(size.clone(), requires_grad=False)
        self.bx = nn.Parameter(first.clone(), requires_grad=False)
        self.nx = nn.Parameter(torch.tensor(self.counts), requires_grad=False)
        self.frustum = nn.Parameter(frustum_points(config), requires_grad=False)
        self.bins = int(self.frustum.shape[0])
        self.channels = config.out_channels
        self._grid = (size, first, torch.tensor(self.counts))
        neck = config.neck_channels
        self.dtransform = nn.Sequential(
            *_conv_bn_relu(1, 8, 1, bias=True),
            *_conv_bn_relu(8, 32, 5, stride=4, bias=True),
            *_conv_bn_relu(32, _HINT_CHANNELS, 5, stride=2, bias=True),
        )
        self.depthnet = nn.Sequential(
            *_conv_bn_relu(neck + _HINT_CHANNELS, neck, 3, bias=True),
            *_conv_bn_relu(neck, neck, 3, bias=True),
            nn.Conv2d(neck, self.bins + self.channels, 1),
        )
        self.downsample = _downsample(self.channels, self.counts[2], config.downsample)

    def cells(self, intrinsics: Tensor, lidar_to_camera: Tensor, image_aug: Tensor) -> Tensor:
        """The cell of the map that every frustum point lies in, for `forward`.

        Args:
            intrinsics: float [batch, cameras, 3, 3], in pixels of the original images.
            lidar_to_camera: float [batch, cameras, 4, 4], in metres.
            image_aug: float [batch, cameras, 3, 3]: original pixels to the network's.

        Returns:
            int64 [batch · cameras · depth bins · rows · columns]: ((b·Z + z)·X + x)·Y + y, or −1
            outside the map. Compute it in float64; keep it as long as the calibration stays.

        Raises:
            InputError: The calibration cannot be used, or the parameters hold another grid than
                the configuration's.
        """
        for name, wanted in zip(("dx", "bx", "nx"), self._grid, strict=True):
            got = self.get_parameter(name).detach().cpu()
            if not torch.allclose(got.double(), wanted.double(), rtol=1e-5):
                raise InputError(
                    f"the view transform's {name} is {got.tolist()} where its configuration says "
                    f"{wanted.tolist()}: the checkpoint was trained with another map, use its own "
                    "configuration"
                )
        calibration = (intrinsics, lidar_to_camera, image_aug)
        return frustum_cells(self.frustum.detach(), self.dx, self.bx, self.counts, calibration)

    def forward(self, features: Tensor, depth: Tensor, cells: Tensor) -> Tensor:
        """Image features to the bird's-eye view.

        Args:
            features: float [batch, cameras, channels, rows, columns].
            depth: float [batch, cameras, 1, height, width]: metres, 0 where unknown.
            cells: From `cells`.

        Returns:
            float [batch, Z · out_channels, X / downsample, Y / downsample], channel z·C + c: the
            axes of the LiDAR branch's map.
        """
        hint = self.dtransform(depth.flatten(0, 1))
        x = torch.cat([hint, features.flatten(0, 1)], dim=1)
        x = self.depthnet(x)
        probability = x[:, : self.bins].softmax(dim=1)
        context = x[:, self.bins : self.bins + self.channels]
        pooled = splat(probability, context, cells, features.shape[0], self.counts)
        out: Tensor = self.downsample(pooled)
        return out


@fx.wrap
def splat(
    probability: Tensor, context: Tensor, cells: Tensor, batch: int, counts: tuple[int, int, int]
) -> Tensor:
    """The pooled map, float [batch, Z · channels, X, Y]; see `lift_splat_pool`.

    With one cell along z it lies in memory as it was pooled, channels last, which convolutions
    take gladly; a copy would cost as much as half the pooling.
    """
    wide, deep, high = counts
    flat = lift_splat_pool(probability, context, cells, batch * high * wide * deep)
    volume = flat.view(batch, high, wide, deep, -1).permute(0, 1, 4, 2, 3)
    return volume.flatten(1, 2)


def _conv_bn_relu(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, bias: bool = False
) -> tuple[nn.Module, nn.Module, nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=bias)
    return conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)


def _downsample(channels: int, heights: int, stride: int) -> nn.Module:
    if stride not in (1, 2) or (stride == 2 and heights > 1):
        raise InputError(
            f"downsample is {stride} with {heights} cells along z: the view transform knows 1, "
            "and 2 with one cell along z"
        )
    if stride == 1:
        return nn.Identity()
    return nn.Sequential(
        *_conv_bn_relu(channels, channels, 3),
        *_conv_bn_relu(channels, channels, 3, stride=stride),
        *_conv_bn_relu(channels, channels, 3),
    )


def grid_of(config: CameraConfig) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """Cell sizes and centres of the first cells [m], float32 [3] each, and cells along x, y, z."""
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

    float32 [depth bins, rows, columns, 3]: u right and v down in pixels of the network's image, and
    depth in metres.
    """
    height, width = config.image_size
    rows, columns = config.feature_size
    depths = torch.arange(*config.dbound, dtype=torch.float32)
    # From the first to the last pixel in equal steps.
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
    """Flat cell of every frustum point of every camera, ((b·Z + z)·X + x)·Y + y, or −1 outside.

    A point (u, v, d) lies at d · R⁻¹K⁻¹(u', v', 1) + t in the LiDAR's frame, with (u', v') the
    pixel before image augmentation. All in the calibration's precision.
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
        # Cut towards zero as mit-bevfusion cuts it: the first cell along each axis also holds what
        # lies up to one cell below the map. Along z, where the one cell is 20 m high, those are
        # points down to 30 m below the LiDAR, so trained weights depend on it.
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
