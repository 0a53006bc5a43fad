"""The sparse encoder, the fuser of both maps, and the decoder over the bird's-eye view.

The encoder has 21 convolutions from voxels to a feature map. The decoder has SECOND's two scales,
and the pyramid that joins them.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections import OrderedDict
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx, nn

from bev_data import InputError
from bevquant_sparse import to_dense, use_standin

if TYPE_CHECKING:
    from bevfusion.model._config import DecoderConfig, FuserConfig, LidarConfig


def require_spconv() -> ModuleType:
    """`spconv.pytorch`, or bevquant_sparse's stand-in for it where spconv is not installed.

    Raises:
        InputError: spconv is installed and cannot be imported.
    """
    try:
        with warnings.catch_warnings():
            # spconv's annotations make torch warn at import; nothing a user could act on.
            warnings.simplefilter("ignore")
            return importlib.import_module("spconv.pytorch")
    except ImportError as error:
        try:
            use_standin()
        except RuntimeError:  # beside an installed spconv
            raise InputError(
                "the LiDAR branch is built from spconv modules, and the installed spconv cannot be "
                f"imported ({error}): repair it, or uninstall it; without spconv "
                "bevquant_sparse.use_standin() takes its place"
            ) from error
    LOG.warning("spconv is not installed: bevquant_sparse stands in for it, with equal results")
    return importlib.import_module("spconv.pytorch")


LOG = logging.getLogger(__name__)
spconv = require_spconv()
fx.wrap("to_dense")


def norm(channels: int) -> nn.BatchNorm1d:
    """BatchNorm with the constants of mit-bevfusion's sparse encoder."""
    return nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01)


def conv_bn_relu(conv: nn.Module) -> Any:
    """`conv`, then BatchNorm, then ReLU, as one SparseSequential with members 0, 1, 2."""
    return spconv.SparseSequential(conv, norm(cast(int, conv.out_channels)), nn.ReLU(inplace=True))


class SparseBasicBlock(spconv.SparseModule):  # type: ignore[misc, name-defined]
    """Two submanifold 3×3×3 convolutions and a skip connection.

    y = relu(bn2(conv2(h)) + x) with h = relu(bn1(conv1(x))).

    Args:
        channels: Width of input and output; they are equal, so the skip needs no projection.
        indice_key: Both convolutions see the same active sites and share one rulebook.
    """

    def __init__(self, channels: int, indice_key: str) -> None:
        super().__init__()
        self.conv1 = spconv.SubMConv3d(
            channels, channels, 3, padding=1, bias=False, indice_key=indice_key
        )
        self.bn1 = norm(channels)
        self.conv2 = spconv.SubMConv3d(
            channels, channels, 3, padding=1, bias=False, indice_key=indice_key
        )
        self.bn2 = norm(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        """The block on a SparseConvTensor of `channels` features."""
        out = self.conv1(x)
        out = out.replace_feature(self.bn1(out.features))
        out = out.replace_feature(self.relu(out.features))
        out = self.conv2(out)
        out = out.replace_feature(self.bn2(out.features))
        out = out.replace_feature(out.features + x.features)
        return out.replace_feature(self.relu(out.features))


class SparseEncoder(nn.Module):
    """mit-bevfusion's SparseEncoder (order conv, norm, act; residual blocks), same parameter names.

    Stage i halves x, y and z; the last convolution folds z once more. With the `nuscenes` sizes
    the grid goes 1440×1440×41 → 720×720×21 → 360×360×11 → 180×180×5 → 180×180×2.

    With `LidarConfig.zyx` the axes of grid and kernels are z, y, x: mmdetection3d's SparseEncoder.
    """

    def __init__(self, config: LidarConfig) -> None:
        super().__init__()
        self.zyx = config.zyx
        self.sparse_shape = list(self._axes(config.sparse_shape))
        channels = config.base_channels
        self.conv_input = conv_bn_relu(
            spconv.SubMConv3d(
                config.in_channels, channels, 3, padding=1, bias=False, indice_key="subm1"
            )
        )
        stages: OrderedDict[str, nn.Module] = OrderedDict()
        last = len(config.encoder_channels)
        for stage, (widths, paddings) in enumerate(
            zip(config.encoder_channels, config.encoder_paddings, strict=True), start=1
        ):
            blocks = list(widths) if stage == last else list(widths[:-1])
            members: list[nn.Module] = [SparseBasicBlock(w, f"subm{stage}") for w in blocks]
            if stage != last:
                down = spconv.SparseConv3d(
                    channels,
                    widths[-1],
                    3,
                    stride=2,
                    padding=self._axes(paddings[-1]),
                    bias=False,
                    indice_key=f"spconv{stage}",
                )
                members.append(conv_bn_relu(down))
            channels = widths[-1]
            stages[f"encoder_layer{stage}"] = spconv.SparseSequential(*members)
        self.encoder_layers = spconv.SparseSequential(stages)
        self.conv_out = conv_bn_relu(
            spconv.SparseConv3d(
                channels,
                config.output_channels,
                self._axes((1, 1, 3)),
                stride=self._axes((1, 1, 2)),
                bias=False,
                indice_key="spconv_down2",
            )
        )

    def _axes(self, sizes: Any) -> Any:
        """Sizes given as x, y, z in the order of the grid; one number for all axes stays."""
        return tuple(reversed(sizes)) if self.zyx and not isinstance(sizes, int) else sizes

    def forward(self, features: Tensor, coords: Tensor, batch_size: int) -> Tensor:
        """Voxels to the bird's-eye view.

        Args:
            features: float [voxels, in_channels].
            coords: int32 [voxels, 4]: batch, x, y, z; with `zyx` batch, z, y, x.
            batch_size: Number of frames in the batch.

        Returns:
            float [batch, output_channels · z, x, y], with `zyx` [batch, output_channels · z, y, x]:
            channel c·Z + z holds channel c at height z.
        """
        x: Any = spconv.SparseConvTensor(features, coords, self.sparse_shape, batch_size)
        x = self.conv_input(x)
        x = self.encoder_layers(x)
        x = self.conv_out(x)
        dense = to_dense(x.features, x.indices, x.spatial_shape, x.batch_size)
        if not self.zyx:
            dense = dense.permute(0, 1, 4, 2, 3)
        return dense.flatten(1, 2)


class ConvFuser(nn.Module):
    """mit-bevfusion's ConvFuser: y = relu(bn(conv3×3(concat(camera, lidar)))).

    The members are called 0, 1 and 2, as those of the nn.Sequential that mit-bevfusion makes of
    them.
    """

    def __init__(self, config: FuserConfig) -> None:
        super().__init__()
        conv = nn.Conv2d(sum(config.in_channels), config.out_channels, 3, padding=1, bias=False)
        for index, member in enumerate(
            (conv, nn.BatchNorm2d(config.out_channels), nn.ReLU(inplace=True))
        ):
            self.add_module(str(index), member)

    def forward(self, camera: Tensor, lidar: Tensor) -> Tensor:
        """Fuse two maps.

        Args:
            camera: float [batch, camera channels, x, y].
            lidar: float [batch, LiDAR channels, x, y].

        Returns:
            float [batch, out_channels, x, y].
        """
        x = torch.cat([camera, lidar], 1)
        for name in ("0", "1", "2"):
            x = getattr(self, name)(x)
        return x


def _norm_relu(channels: int) -> tuple[nn.Module, nn.Module]:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01), nn.ReLU(inplace=True)


class SECOND(nn.Module):
    """The backbone of SECOND (Yan et al. 2018): one chain of 3×3 convolutions for each scale.

    Args:
        config: Sizes.
        in_channels: Channels of the map that is decoded.
    """

    def __init__(self, config: DecoderConfig, in_channels: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        width = in_channels
        for channels, layers, stride in zip(
            config.channels, config.layers, config.strides, strict=True
        ):
            members: list[nn.Module] = []
            for index in range(layers + 1):
                step = stride if index == 0 else 1
                members += [
                    nn.Conv2d(width, channels, 3, stride=step, padding=1, bias=False),
                    *_norm_relu(channels),
                ]
                width = channels
            self.blocks.append(nn.Sequential(*members))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map float [batch, in_channels, x, y] to one map for each scale, finest first."""
        maps = []
        for block in self.blocks:
            x = block(x)
            maps.append(x)
        return tuple(maps)


class SECONDFPN(nn.Module):
    """SECOND's neck: every scale brought to the finest one's size, then concatenated.

    A scale of stride 1 goes through a 1×1 convolution, one of stride s > 1 through a transposed
    convolution whose kernel and stride are s, one of 1/s through a convolution of that kernel and
    stride.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.deblocks = nn.ModuleList()
        for wide_in, wide_out, stride in zip(
            config.channels, config.upsample_channels, config.upsample_strides, strict=True
        ):
            kind = nn.ConvTranspose2d if stride > 1 else nn.Conv2d
            size = round(max(stride, 1 / stride))
            up = kind(wide_in, wide_out, size, stride=size, bias=False)
            self.deblocks.append(nn.Sequential(up, *_norm_relu(wide_out)))

    def forward(self, maps: tuple[Tensor, ...]) -> Tensor:
        """Join the maps of `SECOND` into float [batch, sum of upsample_channels, x, y]."""
        return torch.cat([deblock(maps[i]) for i, deblock in enumerate(self.deblocks)], 1)
