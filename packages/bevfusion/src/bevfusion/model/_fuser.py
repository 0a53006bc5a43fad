"""Camera and LiDAR maps into one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from bevfusion.model._config import FuserConfig


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
