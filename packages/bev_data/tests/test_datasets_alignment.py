"""Do LiDAR points fall on the objects in the images? Measured on real data."""

from __future__ import annotations

import json

import numpy as np
import pytest
from silhouettes import agreement, assert_sharpest_unmoved

from bev_data.boxes import count_inside
from bev_data.cameras import CAMERA_NAMES, project
from bev_data.datasets import open_dataset
from bev_data.points import Frame

CORNERS = np.stack(np.meshgrid(*3 * [[-0.5, 0.5]], indexing="ij"), -1).reshape(8, 3)


def corners_of(box: np.ndarray) -> np.ndarray:
    c, s = np.cos(box[6]), np.sin(box[6])
    return CORNERS * box[3:6] @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]]) + box[:3]


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
