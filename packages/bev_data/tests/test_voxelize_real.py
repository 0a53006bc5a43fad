"""The nuScenes keyframe, where it is at hand: equal to the definition done with numpy alone."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from bev_data.points import read_points
from bev_data.voxelize import Voxelizer


@pytest.fixture
def keyframe() -> np.ndarray:
    said = os.environ.get("BEVQUANT_DATA")
    data = Path(said) if said else Path(__file__).resolve().parents[4] / "shared" / "data"
    found = list((data / "mmdet3d_demo/nuscenes").glob("*LIDAR_TOP*.pcd.bin"))
    if not found:
        pytest.skip("no real data: set BEVQUANT_DATA")
    return read_points(found[0]).points


def test_keyframe(keyframe):
    low, size = np.float32([-54, -54, -5]), np.float32([0.075, 0.075, 0.2])
    cells = np.floor((keyframe[:, :3] - low) / size).astype(np.int64)
    inside = ((cells >= 0) & (cells < [1440, 1440, 40])).all(axis=1)
    rows, cells = keyframe[inside].astype(np.float64), cells[inside]
    unique, first, member = np.unique(cells, axis=0, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))  # voxels in the order of their first point
    got = Voxelizer()(keyframe)
    assert got.points_out_of_range == int((~inside).sum())
    assert len(got) == len(unique)
    np.testing.assert_array_equal(got.coords.numpy()[rank, 1:], unique)
    for voxel in np.random.default_rng(0).integers(0, len(unique), 400):
        used = rows[member.ravel() == voxel][:10]
        mean = np.add.reduce(used[:, None, :], axis=0)[0] / len(used)
        np.testing.assert_allclose(got.features[rank[voxel]].numpy(), mean, rtol=1e-7, atol=1e-12)
        assert got.num_points[rank[voxel]] == len(used)
