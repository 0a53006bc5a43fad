"""Do LiDAR points fall on the objects in the images? Measured on real data."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bevfusion_quant.cameras import CAMERA_NAMES, Camera, project
from bevfusion_quant.datasets import open_dataset
from bevfusion_quant.datasets._inside import count_inside
from bevfusion_quant.points import Frame

SHIFTS = range(-40, 41, 8)  # pixels
CORNERS = np.stack(np.meshgrid(*3 * [[-0.5, 0.5]], indexing="ij"), -1).reshape(8, 3)


def corners_of(box: np.ndarray) -> np.ndarray:
    c, s = np.cos(box[6]), np.sin(box[6])
    return CORNERS * box[3:6] @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]]) + box[:3]


def silhouettes(camera: Camera, points: np.ndarray, band: int, gap: int, ratio: float):
    """Pixels between neighbours in a row of returns of which one is `ratio` times as far."""
    pixels, depth = project(camera, points)
    with np.errstate(invalid="ignore"):
        seen = (pixels > [50, 0]) & (pixels < [camera.width - 50, camera.height])
    seen = seen.all(axis=1) & (depth > 1)
    pixels, depth = pixels[seen], depth[seen]
    row = pixels[:, 1] // band
    order = np.lexsort((pixels[:, 0], row))
    pixels, depth, row = pixels[order], depth[order], row[order]
    beside = (row[1:] == row[:-1]) & (np.diff(pixels[:, 0]) < gap)
    far = depth[1:] / depth[:-1]
    jump = np.flatnonzero(beside & ((far > ratio) | (far < 1 / ratio)))
    return ((pixels[jump] + pixels[jump + 1]) / 2).astype(int)


def agreement(frames, *, band: int, gap: int, ratio: float) -> np.ndarray:
    """Mean contrast of the image at the silhouettes, moved sideways by each of `SHIFTS`.

    Silhouettes in depth are mostly edges in the image; where the calibration holds, no shift finds
    stronger edges.
    """
    total, count = np.zeros(len(SHIFTS)), 0
    for frame in frames:
        for camera in frame.cameras:
            grey = camera.image[..., 1].astype(np.float32)
            contrast = np.zeros_like(grey)
            contrast[:, 1:-1] = np.abs(grey[:, 2:] - grey[:, :-2])
            contrast = np.minimum(contrast, np.percentile(contrast[::4, ::4], 98))
            column, row = silhouettes(camera, frame.points, band, gap, ratio).T
            around = np.array(SHIFTS)[:, None, None] + np.arange(-3, 4)[:, None] + column
            around = np.clip(around, 0, camera.width - 1)
            total += contrast[row, around].max(axis=1).sum(axis=1)
            count += len(column)
    assert count > 300
    return total / count


def assert_sharpest_unmoved(found: np.ndarray, by: float) -> None:
    middle = len(SHIFTS) // 2
    assert np.argmax(found) == middle, found.round(2)
    far = np.r_[found[: middle - 2], found[middle + 3 :]]
    assert found[middle] > by * far.mean(), found.round(2)


def test_pandaset_silhouettes(real_data):
    frames = open_dataset("pandaset", real_data / "pandaset_002_compact", cameras="available")
    assert_sharpest_unmoved(agreement([frames[3]], band=4, gap=10, ratio=1.3), 1.08)


def test_kitti_silhouettes(real_data):
    frames = open_dataset("kitti", real_data / "avod_kitti13")
    assert_sharpest_unmoved(agreement(frames[:3], band=4, gap=10, ratio=1.3), 1.08)


@pytest.fixture(scope="module")
def keyframe(keyframe_info, tmp_path_factory) -> Frame:
    """The real nuScenes keyframe through a `calib.json`, as somebody would write it by hand."""
    info, objects = keyframe_info, keyframe_info["instances"]
    cameras = [
        {
            "name": name,
            "image": str(info["folder"] / info["images"][name]["img_path"]),
            "width": 1600,
            "height": 900,
            "intrinsics": info["images"][name]["cam2img"],
            "lidar_to_camera": info["images"][name]["lidar2cam"],
        }
        for name in CAMERA_NAMES
    ]
    labels = {
        "boxes": np.array([thing["bbox_3d"] for thing in objects]).tolist(),
        "names": [info["classes"][thing["bbox_label_3d"]] for thing in objects],
        "num_points": [int(thing["num_lidar_pts"]) for thing in objects],
    }
    points = str(info["folder"] / info["lidar_points"]["lidar_path"])
    folder = tmp_path_factory.mktemp("keyframe")
    content = {"points": points, "cameras": cameras, "labels": labels}
    (folder / "calib.json").write_text(json.dumps(content))
    (frame,) = open_dataset("files", folder)
    return frame


def test_keyframe_has_the_points_that_nuscenes_counted_in_its_boxes(keyframe):
    counted = keyframe.labels.num_points
    ours = count_inside(keyframe.points, keyframe.labels.boxes)
    assert abs(int(ours.sum()) - int(counted.sum())) < 0.03 * counted.sum()
    assert (np.abs(ours - counted) <= 1 + 0.15 * counted).all()


def test_keyframe_silhouettes(keyframe):
    assert_sharpest_unmoved(agreement([keyframe], band=8, gap=20, ratio=1.2), 1.05)


def test_keyframe_boxes_project_as_in_mmdetection3d(keyframe, keyframe_info):
    boxes = keyframe.labels.boxes.astype(np.float64)
    checked = 0
    for camera in keyframe.cameras:
        centres, depth = project(camera, boxes)
        for thing in keyframe_info["cam_instances"][camera.name]:
            far = np.abs(centres - thing["center_2d"]).max(axis=1) + np.abs(depth - thing["depth"])
            match = int(np.nanargmin(far))
            assert far[match] < 0.05
            pixels, corner_depth = project(camera, corners_of(boxes[match]))
            inside = (pixels > 0) & (pixels < [camera.width, camera.height])
            if (corner_depth > 0).all() and inside.all():
                rectangle = np.r_[pixels.min(axis=0), pixels.max(axis=0)]
                # mmdetection3d stands its boxes on the camera's level, which leans a little.
                size = np.ptp(pixels, axis=0).max()
                np.testing.assert_allclose(rectangle, thing["bbox"], atol=0.05 * size)
                checked += 1
    assert checked > 50


def test_street_silhouettes():
    frames = open_dataset("street", first_seed=1, cameras="tiny", sweeps=1)
    assert_sharpest_unmoved(agreement(frames, band=3, gap=5, ratio=1.2), 1.08)
