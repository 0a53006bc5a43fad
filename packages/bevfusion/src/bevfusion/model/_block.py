"""The residual block of the sparse encoder. Imported only once spconv is known to be there."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from bevfusion.model._spconv import require_spconv

__all__ = ["SparseBasicBlock", "conv_bn_relu", "norm"]

spconv = require_spconv()


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
