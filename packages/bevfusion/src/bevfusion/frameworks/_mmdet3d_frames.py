"""Frames as mmdetection3d's configurations load them, and boxes back in a frame's axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

# Steps of mmdetection3d's test pipelines on frames that are read already.
# Its own classes of steps need nuscenes-devkit and lyft_dataset_sdk; of those for tests few change
# anything.

UNCHANGED = ("GlobalRotScaleTrans", "RandomFlip3D", "PointSegClassMapping", "GlobalAlignment")
"""Without effect in tests (no flip, no rotation), or on labels or scans of ScanNet alone."""


def run_steps(steps: Sequence[Mapping[str, Any]], loaded: dict[str, Any]) -> None:
    """Change the loaded data in place: "points" [n, columns], "img" (or images) and calibration.

    Args:
        steps: Of a configuration's test pipeline.
        loaded: See `FrameLoader`.

    Raises:
        InputError: A step is unknown.
    """
    for step in steps:
        name = step["type"].removeprefix("mmdet.")
        if name.startswith(("Load", "Pack")) or name in UNCHANGED:
            continue
        if name == "MultiScaleFlipAug3D":  # of several scales the first, without flips
            scale = step["img_scale"]
            scale = scale[0] if isinstance(scale, list) else scale
            run_steps([_with_scale(one, scale) for one in step["transforms"]], loaded)
        elif name == "MultiViewWrapper":
            _each_view(step["transforms"], loaded)
        elif name in ("Resize", "Resize3D", "RandomResize3D"):
            _resize(step, loaded, calibrate=name != "Resize")
        elif name == "AffineResize":
            _affine(step, loaded)
        elif name == "PointsRangeFilter":
            bounds, points = step["point_cloud_range"], loaded["points"]
            low, high = points.new_tensor(bounds[:3]), points.new_tensor(bounds[3:])
            inside = (points[:, :3] > low) & (points[:, :3] < high)
            loaded["points"] = points[inside.all(1)]
        elif name == "PointSample":
            loaded["points"] = _sample(loaded["points"], step)
        else:
            raise InputError(
                f"the configuration's test_pipeline has {name}, which is unknown here: remove it, "
                "or name a function that returns your network (package.module:function)"
            )


def _with_scale(step: Mapping[str, Any], scale: Any) -> Mapping[str, Any]:
    return {**step, "scale": scale} if "Resize" in step["type"] else step


def _each_view(steps: Sequence[Mapping[str, Any]], loaded: dict[str, Any]) -> None:
    count = len(loaded["img"])
    views = [{name: loaded[name][index] for name in loaded} for index in range(count)]
    for view in views:
        run_steps(steps, view)
    loaded.update({name: [view[name] for view in views] for name in views[0]})


def _resize(step: Mapping[str, Any], loaded: dict[str, Any], *, calibrate: bool) -> None:
    """mmcv's: to the largest size within a scale, or by factors; `calibrate` changes `cam2img`."""
    import mmcv

    image = loaded["img"]
    height, width = image.shape[:2]
    scale = step.get("scale")
    if scale is None:
        factors = step["scale_factor"]
        x, y = factors if isinstance(factors, tuple | list) else (factors, factors)
        resized = mmcv.imresize(image, (int(width * x + 0.5), int(height * y + 0.5)))
    elif step.get("keep_ratio"):
        resized = mmcv.imrescale(image, tuple(scale))
    else:
        resized = mmcv.imresize(image, tuple(scale))
    factor = resized.shape[1] / width, resized.shape[0] / height
    loaded |= {"img": resized, "img_shape": resized.shape[:2], "scale_factor": factor}
    if calibrate:
        loaded["cam2img"][:2] *= np.array(factor)[:, None]


def _affine(step: Mapping[str, Any], loaded: dict[str, Any]) -> None:
    """The centre stays the centre, and the width is the new one (SMOKE)."""
    import cv2

    image, (width, height) = loaded["img"], step["img_scale"]
    resized = cv2.warpAffine(image, _centred(image, width, height)[:2], (width, height))
    ratio = step["down_ratio"]
    loaded |= {
        "img": resized,
        "img_shape": resized.shape[:2],
        "trans_mat": _centred(image, width // ratio, height // ratio).astype(np.float32),
    }


def _centred(image: Any, width: int, height: int) -> Any:
    factor = width / image.shape[1]
    x, y = (width - factor * image.shape[1]) / 2, (height - factor * image.shape[0]) / 2
    return np.array([[factor, 0, x], [0, factor, y], [0, 0, 1]])


def _sample(points: Tensor, step: Mapping[str, Any]) -> Tensor:
    """As many points as the model takes, the same of a frame in every call."""
    chance, count = np.random.default_rng(0), step["num_points"]
    if len(points) < count:
        return points[chance.choice(len(points), count)]
    # With `sample_range` [m] all points beyond are kept.
    far = np.zeros(0, np.int64)
    near = np.arange(len(points))
    if step.get("sample_range") is not None:
        distant = points[:, :3].norm(dim=1).numpy() >= step["sample_range"]
        far, near = near[distant], near[~distant]
        far = chance.choice(far, min(len(far), count), replace=False)
    rows = np.concatenate([far, chance.choice(near, count - len(far), replace=False)])
    return points[chance.permutation(rows)]


Bounds = tuple[float, float, float, float, float, float]


class FrameLoader:
    """Steps of a configuration's test pipeline between files and the model."""

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

    `to_boxes` leads from the frame's axes to those of the boxes, such as a camera's.
    """
    boxes = found.bboxes_3d
    rows = boxes.tensor.detach().double().numpy()
    # A box is mapped by its centre, and by the direction of its length: (cos, sin, 0) of the yaw in
    # axes of LiDAR and depth, (cos, 0, −sin) in those of a camera (x right, y down, z forward).
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
    return Detections.of_rows(order, made, scores, found.labels_3d.numpy(), velocities[:, :2])
