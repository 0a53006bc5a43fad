"""mmdetection3d's detectors from its own configuration files, without its compiled operators."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bev_data import InputError
from bev_data.boxes import Detections
from bev_data.points import Frame
from bevfusion.frameworks._detector import DATASET_AXES, ForeignDetector, checkpoint_notes
from bevfusion.frameworks._extensions import allocate_on_cpu, use_operator_standins
from bevfusion.frameworks._mmdet3d_frames import FrameLoader, to_detections
from bevquant_sparse import use_bevquant_kernels

# mmdetection3d's detectors without the parts in front of and behind their files.
# Its own forwards read the number of frames out of the coordinates and calibration out of a
# dictionary, which no file can do. Here the same modules run in the same order, with one frame, and
# calibration is an argument.

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
        """The head's outputs from every point and its cell, an image and calibration."""
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
    """Voxels of one frame to the class scores of each voxel (MinkUNet on spconv)."""

    def forward(self, voxels: Voxels) -> Any:
        """The head's outputs [voxels, classes]."""
        from spconv.pytorch import SparseConvTensor  # the one that is installed, or stands in

        backbone, layer = self.model.backbone, self.model.data_preprocessor.voxel_layer
        low, high = layer.point_cloud_range[:3], layer.point_cloud_range[3:]
        axes = zip(low, high, layer.voxel_size, strict=True)
        # The backbone's own forward takes the grid's size out of the coordinates.
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
    """Images to features at fixed places of space, and to the outputs of the head."""

    def forward(self, images: Tensor, calibration: Mapping[str, Tensor]) -> Any:
        """The head's outputs, or (these, valid) where the decoder reads which places are seen."""
        metas = camera_metas(images, calibration)
        # The model's own method samples the images, with calibration from the arguments.
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


NEEDS = (
    "install it without its dependencies: pip install --no-deps mmdet3d==1.4.0 mmdet==3.3.0 "
    "mmengine==0.10.7 mmcv-lite==2.1.0, then what this error names "
    "(docs/howto/from_mmdetection3d.md)"
)
SECOND_STAGE = "the second stage runs in float behind the network, and is in no file"


def load_mmdet3d(
    config: str | os.PathLike[str],
    checkpoint: str | Path | None = None,
    edit: Callable[[Any], None] | None = None,
) -> ForeignDetector:
    """A detector of mmdetection3d 1.4 from its configuration file: LiDAR, cameras or both.

    Its own code builds and runs it; `use_operator_standins` takes the place of mmcv's compiled
    operators where these are absent.

    Args:
        config: A configuration file of mmdetection3d, or the name of one in its wheel, such as
            ``centerpoint/centerpoint_voxel01_second_secfpn_8xb4-cyclic-20e_nus-3d.py``.
        checkpoint: As mmengine saves it; random weights without. Nothing in it is executed.
        edit: Changes the configuration, in place, before the model is built.
    """
    use_operator_standins()
    try:
        import mmdet3d
        import mmdet3d.models  # where its modules register
        from mmdet3d.registry import MODELS
        from mmengine.config import Config
        from mmengine.registry import init_default_scope
    except ImportError as error:
        raise InputError(f"mmdet3d:{config}: {error}; {NEEDS}") from error
    allocate_on_cpu()
    path = Path(config)
    if not path.is_file():
        path = Path(mmdet3d.__file__).parent / ".mim" / "configs" / config
    if not path.is_file():
        raise InputError(f"mmdet3d:{config}: no such file, nor in mmdetection3d's own configs")
    try:
        settings = Config.fromfile(path)
        if edit is not None:
            edit(settings)
        init_default_scope("mmdet3d")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # random weights are the same in every run
            model = MODELS.build(settings.model)
    except Exception as error:  # of the configuration, or of a constructor anywhere
        raise InputError(
            f"mmdet3d:{config}: mmdetection3d cannot build it: {type(error).__name__}: {error}; "
            "correct the configuration, or install what the error names"
        ) from error
    if not hasattr(model, "eval"):
        raise InputError(f"mmdet3d:{config}: mmdetection3d builds no model of it")
    model.eval()
    loader = FrameLoader(model, settings)
    network = _network(model, loader, f"mmdet3d:{config}").eval()
    notes = [] if checkpoint is None else [*checkpoint_notes(model, checkpoint)]
    use_bevquant_kernels(network)
    made = _Reader(network, loader)
    if network.part("roi_head") is not None:
        notes.append(SECOND_STAGE)
    return ForeignDetector(
        network,
        made.arguments,
        made.boxes if made.decodes else None,
        loader.classes,
        tuple(notes),
        loader.extent(),
        DATASET_AXES.get(loader.dataset, ""),
    )


def _network(model: Any, loader: FrameLoader, name: str) -> Network:
    """The part of a detector that belongs into files."""
    made, of_points = Network(model), "LoadPointsFromFile" in loader.loads
    voxels = getattr(model.data_preprocessor, "voxel", False)
    patches = getattr(model, "test_cfg", None) or {}
    reason = ""
    if type(model).__module__.startswith("mmdet."):
        reason = "it is mmdetection's, and finds boxes in images only"
    elif made.head is None:
        reason = "it has no head that runs on one map or set of points"
    elif patches.get("mode") == "slide":
        reason = "it reads patches of rooms, and frames are whole scans"
    elif hasattr(getattr(model, "backbone", None), "backbone_list"):
        reason = "it merges several backbones outside of its modules"
    elif loader.images and of_points and not voxels:
        reason = "it merges votes of an image with those of points"
    if reason:
        raise InputError(
            f"{name}: {type(model).__name__} has no network here: {reason}; name a function that "
            "returns your network (package.module:function)"
        )
    if voxels and hasattr(model, "decode_head"):
        encodes = made.part("voxel_encoder") is not None
        return (SegmentationNetwork if encodes else UNetNetwork)(model)
    if voxels:
        return (FusionNetwork if loader.images else LidarNetwork)(model)
    if hasattr(model, "neck_3d"):
        return VolumeNetwork(model)
    return (ImageNetwork if loader.images else PointNetwork)(model)


class _Reader:
    """Arguments and boxes of a network."""

    def __init__(self, network: Network, loader: FrameLoader) -> None:
        self.network, self.loader = network, loader
        self.decodes = hasattr(network.head, "predict_by_feat")

    def arguments(self, frame: Frame) -> tuple[Any, ...]:
        """The network's arguments for a frame."""
        loader, network = self.loader, self.network
        if getattr(loader.preprocessor, "voxel", False) and not loader.images:
            voxels = loader.voxels(loader.points(frame))
            dynamic = "num_points" not in voxels and isinstance(network, LidarNetwork)
            if dynamic and not network.encodes:
                mean, coords = network.part("voxel_encoder")(voxels["voxels"], voxels["coors"])
                voxels = {"voxels": mean, "coors": coords}
            return (voxels,)
        transformed = loader.transformed(frame)
        if isinstance(network, PointNetwork):
            return (transformed["points"][None],)
        image, metas = loader.image(transformed)
        if isinstance(network, ImageNetwork):
            return (image,)
        calibration = loader.calibration(metas)
        if isinstance(network, FusionNetwork):
            return (loader.voxels(transformed["points"]), image, calibration)
        return (image, calibration)

    def boxes(self, outputs: Any, frame: Frame) -> Detections:
        """Boxes of a frame from the network's outputs, by the code of its head."""
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of a newer torch, about their indexing
            # Their decoders write into what they are given, and view it in its order.
            copies = tree_map_only(Tensor, lambda one: one.contiguous().clone(), outputs)
            found, to_boxes = self._found(copies, frame)
        return to_detections(found, to_boxes)

    def _found(self, outputs: Any, frame: Frame) -> tuple[Any, npt.NDArray[np.float64]]:
        from mmdet3d import structures

        network, loader, head = self.network, self.loader, self.network.head
        if getattr(head, "featmap_sizes", None) == []:
            network(*self.arguments(frame))  # SSN's head takes the sizes from its own forward
        if isinstance(network, ImageNetwork):
            metas = {
                **loader.image(loader.transformed(frame))[1],
                "box_type_3d": structures.CameraInstance3DBoxes,
            }
            found = head.predict_by_feat(*outputs, batch_img_metas=[metas])
            results = found[0] if isinstance(found, tuple) else found
            return results[0], frame.cameras[0].lidar_to_camera
        kind = "Depth" if getattr(network.model, "coord_type", "") == "DEPTH" else "LiDAR"
        metas = {"box_type_3d": getattr(structures, f"{kind}Instance3DBoxes")}
        if network.part("roi_head") is not None:
            return self._second_stage(outputs, frame, metas), np.eye(4)
        if isinstance(network, PointNetwork):
            (points,) = self.arguments(frame)
            found = head.predict_by_feat([points[0]], outputs, batch_input_metas=[metas])
            return found[0], np.eye(4)
        if kind == "Depth":
            outputs = (*outputs[0], outputs[1])
        given = (outputs,) if hasattr(head, "task_heads") else tuple(outputs)
        return head.predict_by_feat(*given, batch_input_metas=[metas])[0], np.eye(4)

    def _second_stage(self, outputs: Any, frame: Frame, metas: dict[str, Any]) -> Any:
        """Boxes of the second stage, in float, from the first one's outputs."""
        model, head, (given,) = self.network.model, self.network.head, self.arguments(frame)
        first, *features = outputs
        cfg = {"cfg": head.test_cfg, "batch_input_metas": [metas]}
        if isinstance(self.network, PointNetwork):
            proposals = head.predict_by_feat(given, *first, **cfg)
            read = {
                "fp_features": features[0]["fp_features"],
                "fp_points": features[0]["fp_xyz"],
                "points_cls_preds": first[1],
            }
        else:
            proposals = head.predict_by_feat(*first, **cfg)
            read = {"seg_features": features[1], "voxels_dict": given}
            if hasattr(model, "points_encoder"):
                inputs = {"points": [self.loader.points(frame)], "voxels": given}
                encoded = {"spatial_feats": features[0], "multi_scale_3d_feats": features[1]}
                read = model.points_encoder(inputs, encoded, proposals)
        return model.roi_head.predict(read, proposals, [SimpleNamespace(metainfo=metas)])[0]
