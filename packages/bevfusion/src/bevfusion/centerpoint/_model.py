"""CenterPoint under the names that mmdetection3d gives its modules, and its head.

The head is one shared convolution, then for each task a sub-head of small branches.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from bev_data import InputError
from bev_data.boxes import Detections
from bevfusion.centerpoint._config import PARTS, CenterHeadConfig, CenterPointConfig, PillarConfig
from bevfusion.centerpoint._decode import decode
from bevfusion.centerpoint._pillars import (
    DecoratedPillars,
    PillarFeatureNet,
    PointPillarsScatter,
    VoxelMeans,
)
from bevfusion.model import SECOND, SECONDFPN, Batch, Detector, lidar_map, prepared
from bevfusion.model._build import expect
from bevfusion.model._model import FlowStep
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
        """Names of `forward`'s outputs, in order."""
        names = (*dict(self.config.branches), "heatmap")
        return tuple(f"{name}_{task}" for task in range(len(self.task_heads)) for name in names)

    @property
    def heatmap_layers(self) -> tuple[Any, ...]:
        """The layers that make the logits of classes."""
        heads: Any = self.task_heads
        return tuple(head.heatmap[1] for head in heads)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Head maps for `decode` from the decoder's map.

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


METRES_IN_FLOAT = (
    "its input has coordinates in metres beside offsets in centimetres, of which 8 bits keep one; "
    "engines run it in fp16, and it is one or two percent of the operations"
)


class CenterPoint(Detector):
    """CenterPoint (Yin et al. 2021) as mmdetection3d has it, with voxels or pillars.

    `pts_voxel_layer` makes voxels of points, and their means or decorated points;
    `pts_voxel_encoder` is the pillars' PillarFeatureNet, of voxels nothing (their means are the
    features); then `pts_middle_encoder`, `pts_backbone`, `pts_neck` and `pts_bbox_head`. Maps are
    [batch, channels, y, x]. `build_centerpoint` makes it.
    """

    part_paths = MappingProxyType(
        {
            "lidar": ("pts_voxel_encoder", "pts_middle_encoder"),
            "decoder": ("pts_backbone", "pts_neck"),
            "head": ("pts_bbox_head",),
        }
    )
    steps: tuple[FlowStep, ...] = (
        FlowStep("LiDAR encoder", "lidar", "pts_middle_encoder", ("voxels",), "lidar"),
        FlowStep("decoder backbone", "decoder", "pts_backbone", ("lidar",), "decoded"),
        FlowStep("decoder neck", "decoder", "pts_neck", ("decoded",), "decoder"),
        FlowStep("head", "head", "pts_bbox_head", ("decoder",), "head"),
    )
    stages = MappingProxyType({step.part: step.path for step in steps})
    folded_apart = tuple(path for paths in part_paths.values() for path in paths)
    map_axes = "yx"

    def __init__(self, config: CenterPointConfig, parts: Iterable[str] = PARTS) -> None:
        super().__init__()
        chosen, lidar = set(parts), config.lidar
        self.kind = config.kind
        if isinstance(lidar, PillarConfig):
            self.pts_voxel_layer: nn.Module = DecoratedPillars(lidar)
            self.pts_voxel_encoder: nn.Module = PillarFeatureNet(lidar)
            self.kept_in_float = {"pts_voxel_encoder": METRES_IN_FLOAT}
            self.pts_middle_encoder: nn.Module = PointPillarsScatter(lidar)
            self.steps = (
                FlowStep("pillar encoder", "lidar", "pts_voxel_encoder", ("voxels",), "pillars"),
                FlowStep("scatter", "lidar", "pts_middle_encoder", ("pillars",), "lidar"),
                *self.steps[1:],
            )
        else:
            from bevfusion.model._encoder import SparseEncoder

            self.pts_voxel_layer = VoxelMeans(lidar)
            self.pts_voxel_encoder = nn.Identity()
            self.pts_middle_encoder = SparseEncoder(lidar)
        if "decoder" in chosen:
            self.pts_backbone = SECOND(config.decoder, config.decoder.in_channels)
            self.pts_neck = SECONDFPN(config.decoder)
        if "head" in chosen:
            self.pts_bbox_head = CenterHead(config.head)

    @property
    def lidar(self) -> dict[str, nn.Module]:
        """The LiDAR branch: voxelize and backbone."""
        return {"voxelize": self.pts_voxel_layer, "backbone": self.pts_middle_encoder}

    @property
    def decoder(self) -> dict[str, nn.Module]:
        """The decoder: backbone and neck."""
        return {"backbone": self.pts_backbone, "neck": self.pts_neck}

    @property
    def head(self) -> CenterHead:
        """The detection head, whose `decode` turns the model's outputs into boxes."""
        if "head" not in self.parts:
            raise LookupError(f"this model has no head, only {', '.join(self.parts)}")
        return self.pts_bbox_head

    def encode_lidar(self, features: Tensor, coords: Tensor, batch_size: int) -> Any:
        """Of pillars, `pts_voxel_encoder` runs before the scatter to the map."""
        return self.pts_middle_encoder(self.pts_voxel_encoder(features), coords, batch_size)

    def forward(
        self,
        features: Tensor,
        coords: Tensor,
        batch_size: int,
        images: None = None,
        depth: None = None,
        cells: None = None,
    ) -> Any:
        """Run the parts that are built.

        Args:
            features: From `pts_voxel_layer`: float [voxels, columns], of pillars float [pillars,
                points, columns + 6].
            coords: int32 [voxels, 4]: batch, z, y, x.
            batch_size: Number of frames.
            images: Not read, nor are `depth` and `cells`; they have their places in a `Batch`.
            depth: Not read.
            cells: Not read.

        Returns:
            The head's dict of maps; without a head the last part's map.
        """
        x = self.encode_lidar(features, coords, batch_size)
        if "pts_backbone" in self._modules:
            x = self.pts_neck(self.pts_backbone(x))
        return self.pts_bbox_head(x) if "pts_bbox_head" in self._modules else x


def build_centerpoint(config: CenterPointConfig, parts: Iterable[str] = PARTS) -> CenterPoint:
    """A float CenterPoint of the given sizes, in eval mode.

    Args:
        config: Sizes, from `VOXEL_CONFIGS`, `PILLAR_CONFIGS` or your own.
        parts: "lidar"; or with it "decoder"; or with both "head".

    Raises:
        InputError: Parts that cannot run together, or sizes that contradict each other.

    Example:
        >>> from bevfusion.centerpoint import PILLAR_CONFIGS, build_centerpoint
        >>> model = build_centerpoint(PILLAR_CONFIGS["tiny"])
        >>> [name for name, _ in model.named_children()][1:]
        ['pts_voxel_encoder', 'pts_middle_encoder', 'pts_backbone', 'pts_neck', 'pts_bbox_head']
    """
    given = set(parts)
    chosen = tuple(part for part in PARTS if part in given)
    if given != set(chosen) or chosen != PARTS[: len(chosen)] or not chosen:
        raise InputError(
            f"the parts {', '.join(sorted(given)) or '(none)'} cannot run alone: CenterPoint has "
            f"{', '.join(PARTS)}, and each reads the one before it"
        )
    _check_sizes(config)
    return prepared(CenterPoint(config, chosen))


def _check_sizes(config: CenterPointConfig) -> None:
    lidar, decoder, head = config.lidar, config.decoder, config.head
    x, y, _ = lidar.sparse_shape
    if isinstance(lidar, PillarConfig):
        channels, factor = lidar.feat_channels[-1], 1
    else:
        channels, cells_x, _ = lidar_map(lidar)
        factor = round(x / cells_x)
    stride = factor * decoder.strides[0] / decoder.upsample_strides[0]
    wanted = {
        "decoder.in_channels": (decoder.in_channels, channels),
        "head.in_channels": (head.in_channels, sum(decoder.upsample_channels)),
        "head.out_size_factor": (head.out_size_factor, stride),
        "head.map_size": (head.map_size, (x / stride, y / stride)),
        "head.voxel_size": (head.voxel_size, lidar.voxel_size[:2]),
        "head.origin": (head.origin, lidar.point_cloud_range[:2]),
    }
    for name, (stated, made) in wanted.items():
        expect(config, name, stated, "the parts before it make", made)


def example_voxels(config: CenterPointConfig) -> Batch:
    """A few voxels or pillars in the middle of the grid: enough to trace a model with."""
    lidar = config.lidar
    x, y, z = (n // 2 for n in lidar.sparse_shape)
    steps = torch.arange(8, dtype=torch.int32)
    height, shape = z + steps % 2, torch.Size((8, lidar.in_channels))
    if isinstance(lidar, PillarConfig):
        height, shape = steps * 0, torch.Size((8, lidar.max_num_points, lidar.decorated_channels))
    coords = torch.stack([steps * 0, height, y + steps % 3, x + steps], dim=1)
    features = torch.linspace(-1, 1, shape.numel()).reshape(shape)
    return Batch(features, coords.contiguous(), 1)
