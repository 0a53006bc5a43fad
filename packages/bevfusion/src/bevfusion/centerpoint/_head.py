"""CenterHead: one shared convolution, then for each task a sub-head of small branches."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from bev_data.boxes import Detections
from bevfusion.centerpoint._config import CenterHeadConfig
from bevfusion.centerpoint._decode import decode
from bevfusion.model.head import ConvUnit


class SeparateHead(nn.Module):
    """mmdetection3d's SeparateHead: per branch a 3×3 unit and a 3×3 convolution with bias.

    Args:
        config: Widths.
        num_classes: Channels of the task's heatmap.
    """

    def __init__(self, config: CenterHeadConfig, num_classes: int) -> None:
        super().__init__()
        for name, channels in (*config.branches, ("heatmap", num_classes)):
            last = nn.Conv2d(config.branch_channels, channels, 3, padding=1)
            unit = _unit(config.shared_channels, config.branch_channels)
            self.add_module(name, nn.Sequential(unit, last))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Map float [batch, shared_channels, y, x] to one map for each branch."""
        return {name: branch(x) for name, branch in self._modules.items() if branch is not None}


def _unit(in_channels: int, channels: int) -> ConvUnit:
    conv = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
    return ConvUnit(conv, nn.BatchNorm2d(channels))


class CenterHead(nn.Module):
    """mmdetection3d's CenterHead, its parameters' names and shapes.

    Example:
        >>> import torch
        >>> from bevfusion.centerpoint import CenterHead, CenterHeadConfig
        >>> head = CenterHead(CenterHeadConfig(in_channels=4, map_size=(6, 5))).eval()
        >>> outputs = head(torch.zeros(1, 4, 5, 6))
        >>> len(outputs), {name: list(outputs[name].shape) for name in ("reg_0", "heatmap_1")}
        (36, {'reg_0': [1, 2, 5, 6], 'heatmap_1': [1, 2, 5, 6]})
    """

    def __init__(self, config: CenterHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.shared_conv = _unit(config.in_channels, config.shared_channels)
        self.task_heads = nn.ModuleList(SeparateHead(config, len(task)) for task in config.tasks)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of what `forward` answers, in order."""
        names = (*dict(self.config.branches), "heatmap")
        return tuple(f"{name}_{task}" for task in range(len(self.task_heads)) for name in names)

    @property
    def heatmap_layers(self) -> tuple[Any, ...]:
        """The layers that make the logits of classes."""
        heads: Any = self.task_heads
        return tuple(head.heatmap[1] for head in heads)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """From the decoder's map to what `decode` reads.

        Args:
            x: float [batch, in_channels, y, x].

        Returns:
            Maps, each float [batch, …, y, x], named by branch and number of the task: reg_0 (2, the
            centre's place in its cell along x and y, in cells), height_0 (1, the centre's z [m]),
            dim_0 (3, ln of length, width, height [m]), rot_0 (2, sine and cosine of the yaw), vel_0
            (2, along x and y [m/s]) and heatmap_0 (the task's classes, before the sigmoid).
        """
        x = self.shared_conv(x)
        return {
            f"{name}_{task}": value
            for task, head in enumerate(self.task_heads)
            for name, value in head(x).items()
        }

    def decode(
        self, outputs: dict[str, Tensor], *, score_threshold: float | None = None
    ) -> list[Detections]:
        """Boxes of each frame; see `bevfusion.centerpoint.decode`."""
        return decode(outputs, self.config, score_threshold=score_threshold)
