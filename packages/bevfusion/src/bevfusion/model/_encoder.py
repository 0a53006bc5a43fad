"""The sparse encoder: 21 convolutions from voxels to a bird's-eye-view feature map."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections import OrderedDict
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, fx, nn

from bev_data import InputError
from bevquant_sparse import to_dense, use_standin

if TYPE_CHECKING:
    from bevfusion.model._config import LidarConfig


def require_spconv() -> ModuleType:
    """`spconv.pytorch`, or bevquant_sparse's stand-in for it where spconv is not installed."""
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
    """

    def __init__(self, channels: int, indice_key: str) -> None:
        super().__init__()
        # Both convolutions see the same sites, and share one rulebook.
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

    With the `nuscenes` sizes the grid goes 1440×1440×41 → 720×720×21 → 360×360×11 → 180×180×5 →
    180×180×2.
    """

    def __init__(self, config: LidarConfig) -> None:
        super().__init__()
        # mmdetection3d's SparseEncoder has the axes z, y, x, of the grid and of kernels.
        self.zyx = config.zyx
        self.sparse_shape = list(self._axes(config.sparse_shape))
        channels = config.base_channels
        self.conv_input = conv_bn_relu(
            spconv.SubMConv3d(
                config.in_channels, channels, 3, padding=1, bias=False, indice_key="subm1"
            )
        )
        # Stage i halves x, y and z; the last convolution folds z once more.
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
        """Voxels to the bird's-eye view, float [batch, output_channels · z, x, y].

        With `zyx` coordinates are batch, z, y, x, and the map is y, x. Channel c·Z + z
        holds channel c at height z.
        """
        x: Any = spconv.SparseConvTensor(features, coords, self.sparse_shape, batch_size)
        x = self.conv_input(x)
        x = self.encoder_layers(x)
        x = self.conv_out(x)
        dense = to_dense(x.features, x.indices, x.spatial_shape, x.batch_size)
        if not self.zyx:
            dense = dense.permute(0, 1, 4, 2, 3)
        return dense.flatten(1, 2)
