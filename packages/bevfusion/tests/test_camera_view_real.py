"""The view transform on nuScenes' calibration: points in the images come back to their cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bev_data.cameras import CAMERA_NAMES, Camera, prepare_cameras, project
from bevfusion.model import CONFIGS
from bevfusion.model.camera import DepthLSSTransform

BLANK = np.zeros((900, 1600, 3), np.uint8)


def test_lidar_points_seen_by_a_camera_return_to_their_own_cells(
    keyframe_info: dict[str, Any],
) -> None:
    (path,) = keyframe_info["folder"].glob("*LIDAR_TOP*.pcd.bin")
    points = np.fromfile(path, np.float32).reshape(-1, 5)[:, :3].astype(np.float64)
    points = points[np.linalg.norm(points[:, :2], axis=1) < 25.0]
    given = keyframe_info["images"]
    cameras = [
        Camera(
            name,
            BLANK,
            np.array(given[name]["cam2img"], np.float64),
            np.array(given[name]["lidar2cam"], np.float64),
        )
        for name in CAMERA_NAMES
    ]
    config = CONFIGS["nuscenes"].camera
    inputs = prepare_cameras(cameras, config.image_size)
    transform = DepthLSSTransform(config)
    cells = transform.cells(
        inputs.intrinsics[None], inputs.lidar_to_camera[None], inputs.image_aug[None]
    )
    assert 0.7 < (cells >= 0).float().mean() < 0.98
    rows, columns = config.feature_size
    by_camera = cells.view(6, transform.bins, rows, columns).numpy()
    (height, width), (near, far, step) = config.image_size, config.dbound
    seen = 0
    for n, camera in enumerate(cameras):
        pixels, depth = project(camera, points)
        homogeneous = np.column_stack([pixels, np.ones(len(pixels))])
        u, v = (homogeneous @ inputs.image_aug[n].numpy().T)[:, :2].T
        column = np.round(u * (columns - 1) / (width - 1))
        row = np.round(v * (rows - 1) / (height - 1))
        depth_bin = np.round((depth - near) / step)
        inside = (depth >= near) & (depth < far) & (row >= 0) & (row < rows)
        inside &= (column >= 0) & (column < columns)
        where = (depth_bin[inside], row[inside], column[inside])
        cell = by_camera[n][tuple(index.astype(int) for index in where)]
        assert (cell >= 0).all()
        centre = np.stack(np.divmod(cell, 360), 1) * 0.3 - 54.0 + 0.15
        off = np.abs(centre - points[inside, :2]).max(1)
        # Half a depth step, half the distance of two pixels at 25 m, half a cell.
        assert np.percentile(off, 99) < 0.25 + 0.5 * 25.0 * 8 / (800 * 0.48) + 0.15
        assert np.median(off) < 0.25
        seen += len(off)
    assert seen > 5000
    assert torch.unique(cells).numel() > 30_000
