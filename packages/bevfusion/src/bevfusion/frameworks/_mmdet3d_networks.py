"""mmdetection3d's detectors without the parts in front of and behind their files.

Its own forwards read the number of frames out of the coordinates and calibration out of a
dictionary, which no file can do. Here the same modules run in the same order, with one frame, and
calibration is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Voxels = Mapping[str, Tensor]
"""mmdetection3d's "voxels", "coors" (batch, z, y, x) and, of hard voxelization, "num_points"."""


class Network(nn.Module):
    """The modules of a detector; `forward` of a subclass calls those that belong to the files."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def part(self, name: str) -> Any:
        """A module of the detector, with or without the prefix for points; None where absent."""
        return getattr(self.model, f"pts_{name}", None) or getattr(self.model, name, None)

    @property
    def head(self) -> Any:
        """The head of the network's outputs: with two stages, the first stage's."""
        names = ("bbox_head", "rpn_head", "bbox_head_3d", "decode_head")
        return next((found for name in names if (found := self.part(name)) is not None), None)


class VoxelNetwork(Network):
    """The part of LiDAR networks from the sparse encoder on."""

    def from_encoded(self, x: Tensor, coords: Tensor) -> Any:
        """The head's outputs; where a second stage reads features, (these, map, features)."""
        middle = self.part("middle_encoder")
        # SA-SSD's encoder computes its auxiliary loss where this is not given.
        test = {"test_mode": True} if "test_mode" in signature(middle.forward).parameters else {}
        made = middle(x, coords, 1, **test)
        if isinstance(made, dict):
            made = made["spatial_features"], made["seg_features"]
        bev, *features = made if isinstance(made, tuple) else (made,)
        x = self.part("backbone")(bev)
        neck = self.part("neck")
        outputs = self.head(x if neck is None else neck(x))
        kept = [one for one in features if one is not None]
        return (outputs, bev, kept[0]) if kept else outputs


class LidarNetwork(VoxelNetwork):
    """Voxels of one frame to the outputs of the head."""

    def forward(self, voxels: Voxels) -> Any:
        """See `from_encoded`."""
        coords, encode = voxels["coors"], self.part("voxel_encoder")
        if "num_points" in voxels:
            x = encode(voxels["voxels"], voxels["num_points"], coords)
        elif self.encodes:
            x, coords = encode(voxels["voxels"], coords)
        else:
            x = voxels["voxels"]
        return self.from_encoded(x, coords)

    @property
    def encodes(self) -> bool:
        """Whether the voxel encoder has weights; a plain mean is taken in front of the network."""
        return any(True for _ in self.part("voxel_encoder").parameters())


class FusionNetwork(VoxelNetwork):
    """Points with their voxels and an image to the outputs of the head (MVX-Net)."""

    def forward(self, voxels: Voxels, image: Tensor, calibration: Mapping[str, Tensor]) -> Any:
        """The head's outputs.

        Args:
            voxels: Of dynamic voxelization: every point and its cell.
            image: [1, 3, height, width], normalized.
            calibration: See `camera_metas`.
        """
        features = self.model.img_neck(self.model.img_backbone(image))
        points, coords = voxels["voxels"], voxels["coors"]
        metas = [camera_metas(image, calibration)]
        return self.from_encoded(
            *self.part("voxel_encoder")(points, coords, [points], features, metas)
        )


class SegmentationNetwork(Network):
    """Voxels of one frame to the class scores of each voxel (Cylinder3D)."""

    def forward(self, voxels: Voxels) -> Any:
        """The head's outputs: a tensor, or a sparse tensor."""
        x, coords = self.part("voxel_encoder")(voxels["voxels"], voxels["coors"])[:2]
        return self.head(self.model.backbone(x, coords, 1))


class UNetNetwork(Network):
    """Voxels of one frame to the class scores of each voxel (MinkUNet on spconv).

    The backbone's own forward takes the grid's size out of the coordinates; here it is that of the
    range.
    """

    def forward(self, voxels: Voxels) -> Any:
        """The head's outputs [voxels, classes]."""
        from spconv.pytorch import SparseConvTensor  # the one that is installed, or stands in

        backbone, layer = self.model.backbone, self.model.data_preprocessor.voxel_layer
        low, high = layer.point_cloud_range[:3], layer.point_cloud_range[3:]
        axes = zip(low, high, layer.voxel_size, strict=True)
        grid = [round((b - a) / size) + 1 for a, b, size in axes]
        x = backbone.conv_input(SparseConvTensor(voxels["voxels"], voxels["coors"], grid, 1))
        laterals = []
        for encode in backbone.encoder:
            laterals.append(x)
            x = encode(x)
        for (upsample, decode), lateral in zip(backbone.decoder, reversed(laterals), strict=True):
            x = upsample(x)
            x = x.replace_feature(torch.cat((x.features, lateral.features), 1))
            x = decode(x)
        return self.head(x.features)


class PointNetwork(Network):
    """Points of one frame to the outputs of the head, and to features that a second stage reads."""

    def forward(self, points: Tensor) -> Any:
        """The head's outputs for points [1, n, columns], or (these, features)."""
        x = self.model.backbone(points)
        neck = self.part("neck")
        if neck is not None:
            x = neck(x)
        outputs = self.head(x)
        return (outputs, x) if self.part("roi_head") is not None else outputs


class ImageNetwork(Network):
    """A normalized image [1, 3, height, width] to the outputs of a monocular head."""

    def forward(self, image: Tensor) -> Any:
        """The head's outputs."""
        return self.head(self.model.neck(self.model.backbone(image)))


class VolumeNetwork(Network):
    """Images to features at fixed places of space, and to the outputs of the head.

    The model's own `extract_feat` samples the images, with calibration from the arguments.
    """

    def forward(self, images: Tensor, calibration: Mapping[str, Tensor]) -> Any:
        """The head's outputs, or (these, valid) where the decoder reads which places are seen.

        Args:
            images: [1, 3, height, width], or [1, views, 3, height, width].
            calibration: See `camera_metas`.
        """
        metas = camera_metas(images, calibration)
        x, *valid = self.model.extract_feat({"imgs": images}, [SimpleNamespace(metainfo=metas)])
        outputs = self.head([x] if isinstance(x, Tensor) else x)
        # The decoder of rooms reads which places an image sees.
        return (outputs, *valid) if getattr(self.model, "coord_type", "") == "DEPTH" else outputs


def camera_metas(images: Tensor, calibration: Mapping[str, Tensor]) -> dict[str, Any]:
    """Metadata for mmdetection3d's sampling of images; values that differ by frame are tensors.

    Args:
        images: [1, 3, height, width], or [1, views, 3, height, width].
        calibration: "scale_factor" [2], and the projection of the model's coordinate system to the
            original image: "lidar2img" or "depth2img" [4, 4]; with several views "lidar2cam" and
            "ori_cam2img" [views, 4, 4], and "scale_factor" [views, 2].
    """
    size = tuple(images.shape[-2:])
    metas: dict[str, Any] = {**calibration, "input_shape": size, "img_shape": size}
    if images.ndim == 5:
        metas |= {"num_views": images.shape[1], "num_ref_frames": 0}
    return metas
