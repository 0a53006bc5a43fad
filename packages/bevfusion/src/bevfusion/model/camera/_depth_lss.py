"""Lift, splat: image features to the bird's-eye view, with the LiDAR's depth as a hint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

from bev_data import InputError
from bevfusion.model.camera._bev_pool import lift_splat_pool
from bevfusion.model.camera._frustum import frustum_cells, frustum_points, grid_of

if TYPE_CHECKING:
    from bevfusion.model._config import CameraConfig

__all__ = ["DepthLSSTransform"]

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
