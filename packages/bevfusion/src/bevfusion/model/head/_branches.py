"""The prediction branches, and the conv-norm-activation unit they are made of."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

# What each branch predicts and how many values that takes, in mit-bevfusion's order.
BRANCHES: dict[str, int] = {"center": 2, "height": 1, "dim": 3, "rot": 2, "vel": 2}


class ConvUnit(nn.Module):
    """`conv`, `bn`, ReLU: mmcv's ConvModule, same names."""

    def __init__(self, conv: nn.Conv1d | nn.Conv2d, bn: nn.BatchNorm1d | nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv = conv
        self.bn = bn
        self.activate = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Float [batch, in, …] to float [batch, out, …]."""
        y: Tensor = self.activate(self.bn(self.conv(x)))
        return y


class PredictionBranches(nn.Module):
    """mit-bevfusion's FFN: per branch a unit and a 1×1 convolution with bias.

    Args:
        in_channels: Width of the queries.
        channels: Width inside each branch.
        branches: Name and number of outputs of each branch.
    """

    def __init__(self, in_channels: int, channels: int, branches: Mapping[str, int]) -> None:
        super().__init__()
        for name, outputs in branches.items():
            unit = ConvUnit(
                nn.Conv1d(in_channels, channels, 1, bias=False), nn.BatchNorm1d(channels)
            )
            self.add_module(name, nn.Sequential(unit, nn.Conv1d(channels, outputs, 1)))

    def forward(self, query: Tensor) -> dict[str, Tensor]:
        """Queries, float [batch, in, n], to float [batch, outputs, n] of each branch."""
        return {name: branch(query) for name, branch in self._modules.items() if branch is not None}
