"""Frames as mmdetection3d's configurations load them, and boxes back in a frame's axes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bev_data import InputError
from bev_data.cameras import Camera, project
from bev_data.datasets import open_dataset
from bev_data.points import Frame, axes_motion, move_frame
from bevfusion.frameworks import ForeignDetector, ForeignSizes
from bevfusion.frameworks._detector import DATASET_AXES
from bevfusion.frameworks._mmdet3d_frames import FrameLoader, run_steps, to_detections

LOAD = {"type": "LoadPointsFromFile", "coord_type": "LIDAR", "use_dim": 4}
POINTS = np.array([[1, 20, -1.5, 51, 0.1], [-3, 9, 0.5, 255, 0]], np.float32)
FRAME = Frame("two", POINTS)
MODEL = SimpleNamespace(data_preprocessor=None)
TO_FORWARD = np.linalg.inv(axes_motion("forward,left,up"))


def loader(dataset: str, *steps: dict[str, Any]) -> FrameLoader:
    return FrameLoader(MODEL, {"dataset_type": dataset, "test_pipeline": [*steps]})


def test_kitti_has_intensity_to_one() -> None:
    got = loader("KittiDataset", LOAD).points(move_frame(FRAME, TO_FORWARD))
    assert torch.allclose(got, torch.tensor([[20, -1, -1.5, 0.2], [9, 3, 0.5, 1]]))


def test_the_range_is_the_voxel_layers() -> None:
    layer = SimpleNamespace(point_cloud_range=[0, -40, -3, 70, 41, 1])
    model = SimpleNamespace(data_preprocessor=SimpleNamespace(voxel_layer=layer, voxel_type="hard"))
    made = FrameLoader(model, {"dataset_type": "KittiDataset"})
    assert made.extent() == (0, -40, -3, 70, 41, 1)
    assert loader("KittiDataset").extent()[0] == -54


def test_data_set_and_classes_of_the_test_dataloader() -> None:
    inner = {"type": "KittiDataset", "metainfo": {"classes": ["Car"]}, "pipeline": [LOAD]}
    wrapped = {"type": "RepeatDataset", "dataset": inner}
    settings = {"test_dataloader": None, "val_dataloader": {"dataset": wrapped}}
    made = FrameLoader(MODEL, settings)
    assert (made.dataset, made.classes) == ("KittiDataset", ("Car",))
    assert np.allclose(made.points(FRAME)[:, 3], [0.2, 1])
    assert FrameLoader(MODEL, {}).classes == ()


def test_classes_have_the_names_of_labels() -> None:
    detector = ForeignDetector(torch.nn.Identity(), lambda frame: (), classes=("Car", "Cyclist"))
    assert ForeignSizes("own:make", detector).head.classes == ("car", "bicycle")


def test_nuscenes_has_the_frames_axes_and_time() -> None:
    got = loader("NuScenesDataset", {**LOAD, "use_dim": 5}).points(FRAME)
    assert np.array_equal(got.numpy(), POINTS)


def test_waymo_has_no_elongation() -> None:
    got = loader("WaymoDataset", {**LOAD, "use_dim": 5, "norm_intensity": True}).points(FRAME)
    assert torch.allclose(got[:, 3], torch.tensor([0.2, 1.0]).tanh())
    assert not got[:, 4].any()


def test_colours_are_refused() -> None:
    step = {**LOAD, "use_dim": [0, 1, 2, 3, 4, 5], "use_color": True}
    with pytest.raises(InputError, match="two: the model reads colours of points"):
        loader("S3DISDataset", step).points(FRAME)


def test_a_frame_without_images_is_refused() -> None:
    with pytest.raises(InputError, match="reads an image and the frame has none: --dataset street"):
        loader("NuScenesDataset", {"type": "LoadImageFromFileMono3D"}).transformed(FRAME)


def test_images_and_calibration_are_in_the_models_axes() -> None:
    """A point in axes of KITTI falls on the pixel on which it falls in the frame's."""
    intrinsics = np.array([[100.0, 0, 80], [0, 100, 45], [0, 0, 1]])
    to_camera = np.array([[1.0, 0, 0, 0.1], [0, 0, -1, -0.2], [0, 1, 0, -0.3], [0, 0, 0, 1]])
    image = np.arange(90 * 160 * 3).reshape(90, 160, 3).astype(np.uint8)
    camera = Camera("CAM_FRONT", image, intrinsics, to_camera)
    frame = move_frame(Frame("camera", POINTS, cameras=(camera,)), TO_FORWARD)
    loaded = loader("KittiDataset", {"type": "LoadImageFromFileMono3D"}).transformed(frame)
    assert np.array_equal(loaded["img"], image[:, :, ::-1])
    own = TO_FORWARD @ [1, 20, -1.5, 1]
    pixel = loaded["lidar2img"] @ own
    assert np.allclose(pixel[:2] / pixel[2], project(camera, POINTS[:1])[0][0], atol=1e-4)
    assert np.allclose(loaded["lidar2cam"] @ own, to_camera @ [1, 20, -1.5, 1])


def test_unknown_steps_are_refused() -> None:
    with pytest.raises(InputError, match="test_pipeline has RandomJitter, which is unknown"):
        run_steps([{"type": "RandomJitter"}], {})


def test_points_are_sampled_alike_and_far_ones_kept() -> None:
    points = torch.randn(500, 4) * 20
    step = {"type": "PointSample", "num_points": 300, "sample_range": 30.0}
    parts = [{"points": points}, {"points": points}]
    for part in parts:
        run_steps([{"type": "MultiScaleFlipAug3D", "img_scale": 1, "transforms": [step]}], part)
    first, second = (part["points"] for part in parts)
    assert torch.equal(first, second)
    assert len(first.unique(dim=0)) == 300
    far = points[points[:, :3].norm(dim=1) >= 30]
    assert 0 < len(far) == int((first[:, :3].norm(dim=1) >= 30).sum())
    few = {"points": points[:10]}
    run_steps([step], few)
    assert few["points"].shape == (300, 4)


def test_points_out_of_range_are_dropped() -> None:
    part = {"points": torch.tensor([[0.0, 0, 0, 1], [5, 0, 0, 1], [1, 1, 1, 1]])}
    bounds = [-1, -1, -1, 2, 2, 2]
    run_steps([{"type": "PointsRangeFilter", "point_cloud_range": bounds}], part)
    assert part["points"].tolist() == [[0, 0, 0, 1], [1, 1, 1, 1]]


def instances(boxes: Any, kind: str) -> Any:
    tensor = torch.tensor(boxes)
    made = type(kind, (), {"tensor": tensor, "gravity_center": tensor[:, :3]})()
    count = len(tensor)
    return SimpleNamespace(
        bboxes_3d=made, scores_3d=torch.arange(count) / 10, labels_3d=torch.arange(count)
    )


def test_boxes_return_to_the_frames_axes() -> None:
    """A car 20 m ahead of KITTI's scanner that drives ahead, and one that drives to the left."""
    rows = [[20.0, -1, 0, 4, 2, 1.5, 0, 3, 0], [20, -1, 0, 4, 2, 1.5, np.pi / 2, 0, 3]]
    own = to_detections(instances(rows, "LiDARInstance3DBoxes"), np.eye(4))
    detector = ForeignDetector(
        torch.nn.Identity(), lambda frame: (frame,), lambda *_: own, axes="forward,left,up"
    ).turned()
    assert detector.turned() is detector
    assert detector.boxes is not None
    found = detector.boxes(None, FRAME)
    assert found.labels.tolist() == [1, 0]
    assert np.allclose(found.boxes[1], [1, 20, 0, 4, 2, 1.5, np.pi / 2], atol=1e-6)
    assert np.allclose(np.abs(found.boxes[0, 6]), np.pi, atol=1e-6)
    assert np.allclose(found.velocities, [[-3, 0], [0, 3]], atol=1e-6)


def test_boxes_of_a_camera_return_to_the_frames_axes() -> None:
    """10 m ahead of a camera that looks to the front: one that drives away, one to the right."""
    to_camera = np.array([[1.0, 0, 0, 0], [0, 0, -1, -0.2], [0, 1, 0, -0.3], [0, 0, 0, 1]])
    rows = [[0.0, 1, 10, 4, 1.5, 2, -np.pi / 2, 0, 3], [0, 1, 10, 4, 1.5, 2, 0, 3, 0]]
    found = to_detections(instances(rows, "CameraInstance3DBoxes"), to_camera)
    assert np.allclose(found.boxes[1], [0, 10.3, -1.2, 4, 2, 1.5, np.pi / 2], atol=1e-6)
    assert np.allclose(found.boxes[0, 6], 0, atol=1e-6)
    assert np.allclose(found.velocities, [[3, 0], [0, 3]], atol=1e-6)


def test_a_model_of_kitti_gets_the_numbers_of_kittis_files() -> None:
    """Frames of the data set have x right; the network gets the scanner's own x forward."""
    shared = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("BEVQUANT_DATA", shared)) / "avod_kitti13"
    if not folder.is_dir():
        pytest.skip("real data is not here: avod_kitti13 (set BEVQUANT_DATA)")
    frame = open_dataset("kitti", folder)[0]
    made = loader("KittiDataset", LOAD)
    axes = DATASET_AXES["KittiDataset"]
    detector = ForeignDetector(torch.nn.Identity(), lambda f: (made.points(f),), axes=axes)
    (found,) = detector.turned().arguments(frame)
    (file,) = folder.rglob(f"velodyne/{frame.name}.bin")
    rows = np.fromfile(file, "<f4").reshape(-1, 4)
    assert len(found) == len(rows)
    assert np.allclose(found, rows, atol=1e-5)


def test_images_are_resized_with_their_calibration() -> None:
    pytest.importorskip("mmcv", reason="needs mmcv-lite 2.1.0")
    image, matrix = np.zeros((90, 160, 3), np.uint8), np.diag([100.0, 100, 1, 1])
    loaded = {"img": image, "cam2img": matrix.copy()}
    run_steps([{"type": "RandomResize3D", "scale": (80, 80), "keep_ratio": True}], loaded)
    assert loaded["img"].shape == (45, 80, 3)
    assert loaded["scale_factor"] == (0.5, 0.5)
    assert np.allclose(loaded["cam2img"], np.diag([50.0, 50, 1, 1]))
    plain = {"img": image, "cam2img": matrix.copy()}
    run_steps([{"type": "mmdet.Resize", "scale_factor": 1.0}], plain)
    assert plain["img"].shape == image.shape
    assert np.array_equal(plain["cam2img"], matrix)


def test_smokes_image_keeps_its_centre() -> None:
    pytest.importorskip("cv2", reason="needs opencv")
    image = np.zeros((90, 160, 3), np.uint8)
    image[45:47, 80:82] = 255
    loaded = {"img": image}
    run_steps([{"type": "AffineResize", "img_scale": (320, 96), "down_ratio": 4}], loaded)
    assert loaded["img"].shape == (96, 320, 3)
    rows, columns = np.nonzero(loaded["img"][:, :, 0])
    assert abs(rows.mean() - 49) < 1
    assert abs(columns.mean() - 161) < 1
    assert np.allclose(loaded["trans_mat"] @ [80, 45, 1], [40, 12, 1])
