"""Sizes and thresholds of the detection head, by default mit-bevfusion's, and its branches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from bev_data import InputError
from bev_data.boxes import NUSCENES_CLASSES

NMS_KINDS = ("none", "circle", "rotated")
HEIGHTS = ("top", "centre")


class MapSizes:
    """Sizes common to every head: a map of cells for each class."""

    map_size: tuple[int, int]
    voxel_size: tuple[float, float]
    out_size_factor: int
    origin: tuple[float, float]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names, in the order of the heatmap's channels."""
        raise NotImplementedError

    def _expect(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            found = getattr(self, name)
            raise InputError(f"{type(self).__name__}.{name} must be {what}, not {found!r}")

    @property
    def num_classes(self) -> int:
        """Channels of the heatmap, of all tasks together."""
        return len(self.classes)

    @property
    def cell_size(self) -> tuple[float, float]:
        """Metres that a cell of the map spans along x and y."""
        x, y = self.voxel_size
        return x * self.out_size_factor, y * self.out_size_factor


@dataclass(frozen=True)
class HeadConfig(MapSizes):
    """Everything that `TransFusionHead` and `decode` need to know.

    Attributes:
        in_channels: Channels of the bird's-eye view, SECONDFPN's levels concatenated.
        hidden_channels: Width of the queries.
        branch_channels: Width inside each prediction branch; 64 in mit-bevfusion.
        ffn_channels: Width inside the decoder layer's feed-forward part.
        num_heads: Attention heads; they divide `hidden_channels`.
        num_queries: How many of the heatmap's highest values become queries.
        classes: Names, in the order of the heatmap's channels.
        point_classes: Classes so small that every cell may become a query; the others only where
            the heatmap has a local maximum.
        nms_kernel: Side, in cells, of the square in which a maximum is local; odd.
        map_size: Cells of the bird's-eye view along x and y.
        voxel_size: Metres along x and y.
        out_size_factor: Voxels per cell; a cell is `voxel_size · out_size_factor` wide.
        origin: x and y [m] of the map's low corner.
        height: Which z [m] of a box the branch `height` predicts: "top", as in mit-bevfusion, or
            "centre", as in mmdetection3d's BEVFusion.
        post_center_range: Boxes whose centre lies outside are dropped: low x, y, z, high x, y, z
            [m].
        score_threshold: Boxes with a score above it are kept, from 0 to 1. mit-bevfusion ignores
            the threshold 0; here it drops the boxes whose score is exactly 0, of queries in cells
            that are no local maximum.
        nms: "none", "circle" or "rotated".
        nms_classes: Where non-maximum suppression takes place, in each class by itself.
        nms_radius: For "circle": of centres no farther apart [m], the best one stays.
            mit-bevfusion compares 0.175 with the squared distance.
        nms_iou: For "rotated": of boxes that overlap by more (intersection over union in the
            bird's-eye view), the best one stays.
        dropout: Used in training only.

    Raises:
        InputError: A setting outside its range, named.

    Example:
        >>> from bevfusion.model.head import HeadConfig
        >>> HeadConfig().cell_size
        (0.6, 0.6)
    """

    in_channels: int = 512
    hidden_channels: int = 128
    branch_channels: int = 64
    ffn_channels: int = 256
    num_heads: int = 8
    num_queries: int = 200
    classes: tuple[str, ...] = NUSCENES_CLASSES
    point_classes: tuple[str, ...] = ("pedestrian", "traffic_cone")
    nms_kernel: int = 3
    map_size: tuple[int, int] = (180, 180)
    voxel_size: tuple[float, float] = (0.075, 0.075)
    out_size_factor: int = 8
    origin: tuple[float, float] = (-54.0, -54.0)
    height: str = "top"
    post_center_range: tuple[float, float, float, float, float, float] = (
        -61.2, -61.2, -10.0, 61.2, 61.2, 10.0,
    )  # fmt: skip
    score_threshold: float = 0.0
    nms: str = "none"
    nms_classes: tuple[str, ...] = ("pedestrian", "traffic_cone")
    nms_radius: float = 0.175**0.5
    nms_iou: float = 0.175
    dropout: float = 0.1

    def __post_init__(self) -> None:
        positive = (
            "in_channels", "hidden_channels", "branch_channels", "ffn_channels", "num_heads",
            "num_queries", "nms_kernel", "out_size_factor",
        )  # fmt: skip
        for name in positive:
            self._expect(name, getattr(self, name) >= 1, "at least 1")
        self._expect(
            "num_heads",
            self.hidden_channels % self.num_heads == 0,
            f"a divisor of hidden_channels, {self.hidden_channels}",
        )
        self._expect("nms_kernel", self.nms_kernel % 2 == 1, "odd")
        self._expect("nms_kernel", self.nms_kernel <= min(self.map_size), "no wider than the map")
        room = len(self.classes) * self.map_size[0] * self.map_size[1]
        self._expect("num_queries", self.num_queries <= room, f"at most classes · cells, {room}")
        self._expect("classes", len(set(self.classes)) == len(self.classes), "distinct")
        for name in ("point_classes", "nms_classes"):
            known = set(getattr(self, name)) <= set(self.classes)
            self._expect(name, known, f"among classes, {', '.join(self.classes)}")
        self._expect("height", self.height in HEIGHTS, f"one of {', '.join(HEIGHTS)}")
        self._expect("nms", self.nms in NMS_KINDS, f"one of {', '.join(NMS_KINDS)}")
        self._expect("score_threshold", 0 <= self.score_threshold <= 1, "from 0 to 1")

    @property
    def center_drop(self) -> float:
        """Heights of a box from the z that the head predicts down to the box's centre."""
        return 0.5 if self.height == "top" else 0.0


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
    """mit-bevfusion's FFN: per branch a unit and a 1×1 convolution with bias."""

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
