"""The set of files for Autoware, and the fixed settings of its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bev_data import InputError
from bevfusion.centerpoint import BRANCHES
from bevfusion.deployment._files import (
    PADDED,
    PILLAR_FILE,
    BoxesPart,
    CenterPart,
    FilePart,
    HeldPart,
    centerpoint_files,
    nvidia_files,
)
from bevfusion.model import Detector


class PackedBoxesPart(BoxesPart):
    """The head as Autoware's node reads it: one frame; boxes, scores and classes apart."""

    def forward(self, middle: Tensor) -> tuple[Tensor, ...]:
        """Centre, height, dim, rot and vel [10, queries], score [queries] and class [queries]."""
        score, rot, dim, center, height, vel = super().forward(middle)
        best, label = score[0].max(0)
        return torch.cat([part[0] for part in (center, height, dim, rot, vel)]), best, label


class NodeMapsPart(CenterPart):
    """CenterPoint of one task as Autoware's node reads it: boxes of mmdetection3d before 1.0."""

    def forward(self, spatial_features: Tensor) -> Any:
        """A map to heatmap, reg, height, dim (width first), rot (of the yaw −b − π/2) and vel."""
        x = HeldPart.forward(self, spatial_features)
        maps = [x[f"{name}_0"] for name in ("heatmap", "reg", "height", "vel")]
        box = node_box(x["dim_0"], x["rot_0"])
        return *maps[:3], *box, maps[3]


def node_box(dim: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
    """Sizes and yaw of mmdetection3d before 1.0 from those since, or the other way round."""
    # With the yaw a = −b − π/2, sin a = −cos b and cos a = −sin b.
    turned = torch.cat([rot[:, 1:], rot[:, :1]], 1)
    return torch.cat([dim[:, 1:2], dim[:, :1], dim[:, 2:]], 1), -turned


AUTOWARE_BOXES = FilePart(
    "head.autoware", {"middle": "middle"},
    {name: name for name in ("bbox_pred", "score", "label_pred")},
    lambda m: PackedBoxesPart(m.head),
)  # fmt: skip
"""The head as Autoware's node reads it, part of the whole file alone."""


def autoware_files(model: Detector) -> tuple[FilePart, ...]:
    """The LiDAR encoder, and for a LiDAR detector the layers downstream of it.

    Raises:
        InputError: Pillars that Autoware's node cannot read; every reason is named.
    """
    parts = model.parts
    if model.kind == "bevfusion":
        return nvidia_files(("lidar",) if "fuser" in parts else parts)
    if model.kind == "centerpoint":
        encoder, *dense = centerpoint_files(model)
        note = "Autoware has no node for a CenterPoint of voxels: these files are for one of yours"
        return replace(encoder, notes=(note,)), *dense
    if problems := list(_beside_node(model)):
        raise InputError(
            f"Autoware's lidar_centerpoint node cannot read this model: {'; '.join(problems)}: "
            "build it with sizes of PILLAR_CONFIGS['autoware'] (--config autoware), or export for "
            "tensorrt"
        )
    head = model.head.config
    x, y = head.map_size
    maps = ("heatmap", "reg", "height", "dim", "rot", "vel")
    outputs = {name: f"{'node_' * (name in ('dim', 'rot'))}{name}_0" for name in maps}
    settings = (
        f"the node's parameters: class_names {list(head.classes)}, voxel_size {head.voxel_size}, "
        f"range from {head.origin}, downsample_factor {head.out_size_factor}, map {x} × {y}"
    )
    encoder = replace(
        PILLAR_FILE,
        name="pts_voxel_encoder_centerpoint",
        inputs={"input_features": PADDED},
        build=_NODE_BUILDS,
    )
    dense_parts = ("decoder", "head")
    return encoder, FilePart(
        "pts_backbone_neck_head_centerpoint", {"spatial_features": "lidar"}, outputs,
        lambda m: NodeMapsPart(m, dense_parts), notes=(settings,), build=_NODE_BUILDS,
    )  # fmt: skip


_NODE_BUILDS = (
    "autoware_lidar_centerpoint builds both engines itself, float32 at their ends: trt_precision "
    "int8 where the dense file is quantized"
)
_NODE_POINTS, _NODE_COLUMNS, _NODE_CHANNELS = 32, (10, 11), 32


def _beside_node(model: Any) -> Iterator[str]:
    """Settings of a pillar CenterPoint that differ from autoware_lidar_centerpoint's fixed ones."""
    if "head" not in model.parts:
        yield "it has no head"
        return
    layers, head = model.pts_voxel_encoder.pfn_layers, model.head.config
    points = model.lidar["voxelize"].max_num_points
    columns, channels = layers[0].linear.in_features, layers[-1].linear.out_features
    branches = dict(head.branches)
    if len(head.tasks) != 1:
        yield f"it has {len(head.tasks)} tasks, the node reads one"
    if branches != dict(BRANCHES):
        yield f"its branches are {branches}, the node's {dict(BRANCHES)}"
    if points != _NODE_POINTS:
        yield f"{points} points a pillar, the node's have {_NODE_POINTS}"
    if columns not in _NODE_COLUMNS:
        yield f"{columns} columns a point with its offsets, the node's have 10 or 11"
    if channels != _NODE_CHANNELS:
        yield f"{channels} channels a pillar, the node's have {_NODE_CHANNELS}"
