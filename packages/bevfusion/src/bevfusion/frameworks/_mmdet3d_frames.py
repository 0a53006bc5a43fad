"""Frames as mmdetection3d's configurations load them, and boxes back in a frame's axes."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bev_data import InputError
from bev_data.boxes import Detections
from bev_data.cameras import Camera
from bev_data.points import Frame
from bevfusion.frameworks._detector import ForeignDetector
from bevfusion.frameworks._mmdet3d_steps import run_steps

Bounds = tuple[float, float, float, float, float, float]


class FrameLoader:
    """Steps of a configuration's test pipeline between files and the model.

    Args:
        model: mmdetection3d's detector.
        settings: Its configuration.
    """

    def __init__(self, model: Any, settings: Mapping[str, Any]) -> None:
        self.preprocessor = model.data_preprocessor
        tested = _tested(settings)
        steps = settings.get("test_pipeline") or tested.get("pipeline", ())
        self.dataset = str(settings.get("dataset_type") or tested.get("type", ""))
        info = settings.get("metainfo") or tested.get("metainfo") or {}
        self.classes = tuple(settings.get("class_names") or info.get("classes", ()))
        self.loads = {step["type"]: step for step in steps if step["type"].startswith("Load")}
        self.views = "LoadMultiViewImageFromFiles" in self.loads
        self.images = any("Image" in name for name in self.loads)
        self.nuscenes = "nuscenes" in self.dataset.lower()
        self._steps = steps

    def extent(self) -> Bounds:
        """The model's range: lower and upper x, y, z [m]."""
        layer = getattr(self.preprocessor, "voxel_layer", None)
        if layer is None or self.preprocessor.voxel_type == "cylindrical":
            return ForeignDetector.point_cloud_range
        left, front, low, right, back, high = map(float, layer.point_cloud_range)
        return left, front, low, right, back, high

    def points(self, frame: Frame) -> Tensor:
        """Points [n, columns] with the columns that the model reads."""
        if frame.points is None:
            raise InputError(f"{frame.name}: it holds voxels; the model takes points")
        points = frame.points.copy()
        load = self.loads["LoadPointsFromFile"]
        # Frames have intensities 0..255 and seconds; others than nuScenes' models read 0..1, and in
        # the fifth column Waymo's elongation, which frames do not have.
        if not self.nuscenes:
            points[:, 3:] *= np.array([1 / 255, 0], np.float32)
        used = load.get("use_dim", [0, 1, 2])
        columns = list(range(used) if isinstance(used, int) else used)
        if load.get("use_color") or max(columns) >= points.shape[1]:
            raise InputError(f"{frame.name}: the model reads colours of points, frames have none")
        if "LoadPointsFromMultiSweeps" in self.loads:
            sweeps = self.loads["LoadPointsFromMultiSweeps"]
            columns = [columns[index] for index in sweeps.get("use_dim", [0, 1, 2, 4])]
        points = points[:, columns]
        if load.get("norm_intensity"):
            points[:, 3] = np.tanh(points[:, 3])
        if load.get("shift_height"):
            height = points[:, 2:3] - np.percentile(points[:, 2], 0.99).astype(np.float32)
            points = np.concatenate([points[:, :3], height, points[:, 3:]], 1)
        return torch.from_numpy(np.ascontiguousarray(points))

    def voxels(self, points: Tensor) -> dict[str, Tensor]:
        """Points as the model's own layer voxelizes them."""
        if self.preprocessor.voxel_type == "minkunet":  # whose code needs CUDA
            layer = self.preprocessor.voxel_layer
            bounds, size = points.new_tensor(layer.point_cloud_range), layer.voxel_size
            inside = (points[:, :3] >= bounds[:3]) & (points[:, :3] <= bounds[3:])
            points, size = points[inside.all(1)], points.new_tensor(size)
            cells = torch.round(points[:, :3] / size).int()
            cells -= cells.min(0).values
            (rows,) = self.preprocessor.sparse_quantize(cells.numpy(), return_index=True)
            first = self.preprocessor.batch_first
            coords = torch.nn.functional.pad(cells[rows], (1, 0) if first else (0, 1))
            return {"voxels": points[rows], "coors": coords}
        made = self.preprocessor.voxelize([points], [SimpleNamespace()])
        return {name: value for name, value in made.items() if isinstance(value, Tensor)}

    def transformed(self, frame: Frame) -> dict[str, Any]:
        """Result of the pipeline's steps for a frame: "points", "img", calibration."""
        loaded = self._camera(frame) if self.images else {}
        if "LoadPointsFromFile" in self.loads:
            loaded["points"] = self.points(frame)
        run_steps(self._steps, loaded)
        return loaded

    def image(self, transformed: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The normalized, padded image [1, 3, h, w], or [1, views, 3, h, w], and its metas."""
        from mmdet3d.structures import Det3DDataSample

        images = transformed["img"]
        every = np.stack(images) if self.views else images
        pixels = torch.from_numpy(np.ascontiguousarray(np.moveaxis(every, -1, -3)))
        sample = Det3DDataSample(metainfo={k: v for k, v in transformed.items() if k != "points"})
        made = self.preprocessor.simple_process(
            {"inputs": {"img": [pixels]}, "data_samples": [sample]}
        )
        return made["inputs"]["imgs"], made["data_samples"][0].metainfo

    def calibration(self, metas: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of `camera_metas`."""
        names = ["scale_factor"]
        names += ["lidar2cam", "ori_cam2img"] if self.views else ["lidar2img", "depth2img"]
        return {name: torch.tensor(np.array(metas[name]), dtype=torch.float32) for name in names}

    def _camera(self, frame: Frame) -> dict[str, Any]:
        """Images as files of mmcv hold them (BGR), with calibration."""
        if not frame.cameras:
            raise InputError(
                f"{frame.name}: the model reads an image and the frame has none: --dataset street, "
                "nuscenes, pandaset or kitti, with --cameras CAM_FRONT"
            )
        parts = [self._one_camera(camera) for camera in frame.cameras[: None if self.views else 1]]
        if not self.views:
            return parts[0]
        return {name: [part[name] for part in parts] for name in parts[0]}

    def _one_camera(self, camera: Camera) -> dict[str, Any]:
        to_camera = camera.lidar_to_camera
        to_image = np.eye(4)
        to_image[:3, :3] = camera.intrinsics
        size = camera.image.shape[:2]
        return {
            "img": camera.image[:, :, ::-1].copy(), "img_shape": size, "ori_shape": size,
            "cam2img": to_image.copy(), "ori_cam2img": to_image, "lidar2cam": to_camera,
            "lidar2img": to_image @ to_camera, "depth2img": to_image @ to_camera,
        }  # fmt: skip


def _tested(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The data set of a configuration's tests, without its wrappers; empty where there is none."""
    for name in ("test_dataloader", "val_dataloader"):
        found: Mapping[str, Any] = (settings.get(name) or {}).get("dataset", {})
        while isinstance(found.get("dataset"), Mapping):
            found = found["dataset"]
        if found:
            return found
    return {}


def to_detections(found: Any, to_boxes: npt.NDArray[np.float64]) -> Detections:
    """mmdetection3d's instances as boxes in a frame's axes, best score first.

    A box is mapped by its centre, and by the direction of its length: (cos, sin, 0) of the yaw in
    axes of LiDAR and depth, (cos, 0, −sin) in those of a camera (x right, y down, z forward).

    Args:
        found: With `bboxes_3d`, `scores_3d`, `labels_3d`.
        to_boxes: [4, 4], from the frame's axes to those of the boxes, such as a camera's.
    """
    boxes = found.bboxes_3d
    rows = boxes.tensor.detach().double().numpy()
    of_camera = type(boxes).__name__ == "CameraInstance3DBoxes"
    flat, sizes = ((0, 2), (3, 5, 4)) if of_camera else ((0, 1), (3, 4, 5))
    sign = -1 if of_camera else 1
    back = np.linalg.inv(to_boxes)
    directions, velocities = np.zeros((2, len(rows), 3))
    directions[:, flat[0]], directions[:, flat[1]] = np.cos(rows[:, 6]), sign * np.sin(rows[:, 6])
    if rows.shape[1] > 8:
        velocities[:, flat] = rows[:, 7:9]
    centers = boxes.gravity_center.detach().double().numpy() @ back[:3, :3].T + back[:3, 3]
    directions, velocities = directions @ back[:3, :3].T, velocities @ back[:3, :3].T
    yaw = np.arctan2(directions[:, 1], directions[:, 0])
    scores = found.scores_3d.detach().numpy()
    order = np.argsort(-scores, kind="stable")
    made = np.concatenate([centers, rows[:, sizes], yaw[:, None]], 1)
    return Detections(
        made[order].astype(np.float32),
        scores[order].astype(np.float32),
        found.labels_3d.numpy()[order].astype(np.int64),
        velocities[order, :2].astype(np.float32),
    )
