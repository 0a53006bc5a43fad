"""mmdetection3d's detectors from its own configuration files, without its compiled operators."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bev_data import InputError
from bev_data.boxes import Detections
from bev_data.points import Frame
from bevfusion.frameworks._detector import DATASET_AXES, ForeignDetector, checkpoint_notes
from bevfusion.frameworks._extensions import allocate_on_cpu, use_operator_standins
from bevfusion.frameworks._mmdet3d_frames import FrameLoader, to_detections
from bevfusion.frameworks._mmdet3d_networks import (
    FusionNetwork,
    ImageNetwork,
    LidarNetwork,
    Network,
    PointNetwork,
    SegmentationNetwork,
    UNetNetwork,
    VolumeNetwork,
)
from bevquant_sparse import use_bevquant_kernels

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

    Raises:
        InputError: A package or the file is missing, the configuration cannot be read or built,
            the model is of a kind that has no network here, or the checkpoint is another model's.
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
    """The part of a detector that belongs into files.

    Raises:
        InputError: It is of no known kind.
    """
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
