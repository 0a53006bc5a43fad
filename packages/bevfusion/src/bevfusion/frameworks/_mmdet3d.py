"""mmdetection3d's detectors from its own configuration files, without its compiled operators."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bev_data import InputError
from bev_data.boxes import Detections
from bev_data.points import Frame
from bevfusion.frameworks._detector import ForeignDetector
from bevfusion.frameworks._extensions import use_operator_standins
from bevfusion.model import load_weights
from bevquant_sparse import use_bevquant_kernels

NEEDS = (
    "install it without its dependencies: pip install --no-deps mmdet3d==1.4.0 mmdet==3.3.0 "
    "mmengine==0.10.7 mmcv-lite==2.1.0, then what this error names (docs/howto/own_model.md)"
)


class LidarNetwork(nn.Module):
    """Voxels of one frame to the outputs of the head: a detector without voxelization and decoding.

    mmdetection3d's own forward reads the number of frames out of the coordinates, which no file can
    do. Here the same modules run in the same order with one frame.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, voxels: dict[str, Tensor]) -> Any:
        """The head's outputs.

        Args:
            voxels: mmdetection3d's: "voxels", "num_points", "coors" (batch, z, y, x).
        """
        coords = voxels["coors"]
        x = self._part("voxel_encoder")(voxels["voxels"], voxels["num_points"], coords)
        x = self._part("backbone")(self._part("middle_encoder")(x, coords, 1))
        neck = self._part("neck")
        return self._part("bbox_head")(x if neck is None else neck(x))

    def _part(self, name: str) -> Any:
        return getattr(self.model, f"pts_{name}", None) or getattr(self.model, name, None)


def load_mmdet3d(
    config: str | os.PathLike[str], checkpoint: str | Path | None = None
) -> ForeignDetector:
    """A LiDAR detector of mmdetection3d 1.4 from its configuration file.

    Its own code builds and runs it; `use_operator_standins` takes the place of mmcv's compiled
    operators where these are absent.

    Args:
        config: A configuration file of mmdetection3d, or the name of one in its wheel, such as
            ``centerpoint/centerpoint_voxel01_second_secfpn_8xb4-cyclic-20e_nus-3d.py``.
        checkpoint: As mmengine saves it; random weights without. Nothing in it is executed.

    Raises:
        InputError: A package or the file is missing, the model has no LiDAR branch that ends in a
            head, or the checkpoint is another model's.
    """
    use_operator_standins()
    try:
        import mmdet3d
        from mmdet3d.registry import MODELS
        from mmengine.config import Config
        from mmengine.registry import init_default_scope
    except ImportError as error:
        raise InputError(f"mmdet3d:{config}: {error}; {NEEDS}") from error
    path = Path(config)
    if not path.is_file():
        path = Path(mmdet3d.__file__).parent / ".mim" / "configs" / config
    if not path.is_file():
        raise InputError(f"mmdet3d:{config}: no such file, nor in mmdetection3d's own configs")
    settings = Config.fromfile(path)
    init_default_scope("mmdet3d")
    model = MODELS.build(settings.model).eval()
    head = getattr(model, "pts_bbox_head", None) or getattr(model, "bbox_head", None)
    if head is None or not getattr(model.data_preprocessor, "voxel", False):
        raise InputError(
            f"mmdet3d:{config}: {type(model).__name__} has no branch from voxels to a head; name "
            "a function that returns your network instead (package.module:function)"
        )
    notes = () if checkpoint is None else (str(load_weights(model, checkpoint)),)
    network = LidarNetwork(model).eval()
    use_bevquant_kernels(network)
    return ForeignDetector(
        network,
        _arguments(model, settings),
        _boxes(head),
        tuple(settings.get("class_names", ())),
        notes,
    )


def _arguments(model: Any, settings: Mapping[str, Any]) -> Callable[[Frame], tuple[Any, ...]]:
    """Points as the configuration's pipeline loads them, voxelized by the model's own layer."""
    columns: Sequence[int] = range(4)
    for step in settings.get("test_pipeline", ()):
        if step["type"] == "LoadPointsFromFile":
            used = step.get("use_dim", [0, 1, 2])
            columns = range(used) if isinstance(used, int) else list(used)
        elif step["type"] == "LoadPointsFromMultiSweeps":
            columns = [columns[index] for index in step.get("use_dim", [0, 1, 2, 4])]
    # The frames here have intensities 0..255, KITTI's and Waymo's models were trained on 0..1.
    scale = 1.0 if "nuscenes" in str(settings.get("dataset_type", "")).lower() else 255.0

    def arguments(frame: Frame) -> tuple[Any, ...]:
        if frame.points is None:
            raise InputError(f"{frame.name}: it holds voxels; the model voxelizes points itself")
        points = frame.points.copy()
        points[:, 3] /= scale
        kept = torch.from_numpy(points[:, columns])
        voxels = model.data_preprocessor.voxelize([kept], [])
        return ({name: value for name, value in voxels.items() if isinstance(value, Tensor)},)

    return arguments


def _boxes(head: Any) -> Callable[[Any, Frame], Detections]:
    from mmdet3d.structures import LiDARInstance3DBoxes

    metas = [{"box_type_3d": LiDARInstance3DBoxes}]

    def boxes(outputs: Any, frame: Frame) -> Detections:
        given = (outputs,) if hasattr(head, "task_heads") else tuple(outputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a newer torch, about their indexing
            found = head.predict_by_feat(*given, batch_input_metas=metas)[0]
        tensor = found.bboxes_3d.tensor.detach()
        rows = torch.cat([found.bboxes_3d.gravity_center, tensor[:, 3:7]], 1).numpy()
        yaw = rows[:, 6]
        rows[:, 6] = yaw - 2 * np.pi * np.floor((yaw + np.pi) / (2 * np.pi))
        velocities = np.zeros((len(rows), 2), np.float32)
        if tensor.shape[1] > 8:
            velocities = tensor[:, 7:9].numpy()
        scores = found.scores_3d.detach().numpy()
        order = np.argsort(-scores, kind="stable")
        return Detections(
            rows[order].astype(np.float32),
            scores[order].astype(np.float32),
            found.labels_3d.numpy()[order].astype(np.int64),
            velocities[order].astype(np.float32),
        )

    return boxes
