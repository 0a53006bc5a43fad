from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bev_data.voxelize import Voxelization, VoxelizeError, Voxelizer

SMALL = {"voxel_size": (0.5, 0.25, 0.2), "point_cloud_range": (-2.0, -1.0, -0.4, 2.0, 1.0, 0.4)}


def reference(points, voxel_size, point_cloud_range, max_num_points, max_voxels):
    """The definition, point by point, in plain Python and float32 scalars."""
    low = np.asarray(point_cloud_range[:3], np.float32)
    size = np.asarray(voxel_size, np.float32)
    extent = np.subtract(point_cloud_range[3:], point_cloud_range[:3])
    grid = [round(extent[a] / voxel_size[a]) for a in range(3)]
    members: dict[tuple[int, ...], list[int]] = {}
    outside = 0
    for row, point in enumerate(points):
        cell = tuple(math.floor((point[a] - low[a]) / size[a]) for a in range(3))
        if any(c < 0 or c >= g for c, g in zip(cell, grid, strict=True)):
            outside += 1
        else:
            members.setdefault(cell, []).append(row)
    kept = list(members.items())[:max_voxels]
    means, counts, coords = [], [], []
    for cell, rows in kept:
        used = points[rows[:max_num_points]].astype(np.float64)
        total = np.zeros(points.shape[1])
        for one in used:
            total = total + one
        means.append((total / len(used)).astype(np.float32))
        counts.append(len(used))
        coords.append(cell)
    dropped = list(members.items())[max_voxels:]
    return {
        "features": np.array(means),
        "coords": np.array(coords),
        "num_points": np.array(counts),
        "points_out_of_range": outside,
        "points_over_limit": sum(max(len(rows) - max_num_points, 0) for _, rows in kept),
        "voxels_dropped": len(dropped),
        "points_dropped": sum(len(rows) for _, rows in dropped),
    }


def check(points, batch=0, max_num_points=10, max_voxels=160000, **grid):
    limits = {"max_num_points": max_num_points, "max_voxels": max_voxels}
    want = reference(points, **grid, **limits)
    got = Voxelizer(**grid, **limits)(points, batch=batch)
    np.testing.assert_array_equal(got.features.numpy(), want["features"])
    np.testing.assert_array_equal(got.coords.numpy()[:, 1:], want["coords"])
    np.testing.assert_array_equal(got.num_points.numpy(), want["num_points"])
    assert (got.coords[:, 0] == batch).all()
    for name in ("points_out_of_range", "points_over_limit", "voxels_dropped", "points_dropped"):
        assert getattr(got, name) == want[name], name
    return got


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(3, 7),
    seed=st.integers(0, 2**32 - 1),
    max_num_points=st.integers(1, 12),
    max_voxels=st.integers(1, 200),
    batch=st.integers(0, 3),
)
def test_equal_to_the_definition(rows, columns, seed, max_num_points, max_voxels, batch):
    rng = np.random.default_rng(seed)
    points = rng.normal(0.0, 1.0, (rows, columns)).astype(np.float32)
    points[0, :3] = 0.0  # at least one in range
    got = check(points, batch, max_num_points, max_voxels, **SMALL)
    everything = (
        int(got.num_points.sum())
        + got.points_out_of_range
        + got.points_over_limit
        + got.points_dropped
    )
    assert everything == rows


def test_equal_to_the_definition_at_full_size():
    rng = np.random.default_rng(5)
    points = rng.normal(0.0, [20, 20, 2, 60, 0.2], (6000, 5)).astype(np.float32)
    points = np.repeat(points, rng.integers(1, 14, len(points)), axis=0)
    rng.shuffle(points)
    plain = Voxelizer()
    check(points, voxel_size=plain.voxel_size, point_cloud_range=plain.point_cloud_range)


def test_cell_edges_follow_float32():
    nuscenes = Voxelizer()
    grid = {"voxel_size": nuscenes.voxel_size, "point_cloud_range": nuscenes.point_cloud_range}
    edges = (np.arange(1441) * 0.075 - 54.0).astype(np.float32)
    below, above = np.nextafter(edges, np.float32(-99)), np.nextafter(edges, np.float32(99))
    near = np.concatenate([edges, below, above])
    points = np.zeros((len(near), 5), np.float32)
    points[:, 0] = near
    check(points, **grid)
    z = (np.arange(41) * 0.2 - 5.0).astype(np.float32)
    points = np.zeros((len(z), 5), np.float32)
    points[:, 2] = z
    check(points, **grid)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_lower_bound_is_in_and_upper_bound_is_out(axis):
    voxelizer = Voxelizer(**SMALL)
    points = np.zeros((3, 3), np.float32)
    points[1, axis] = SMALL["point_cloud_range"][axis]
    points[2, axis] = SMALL["point_cloud_range"][axis + 3]
    got = voxelizer(points)
    assert got.points_out_of_range == 1
    assert got.coords[1, axis + 1] == 0


def test_order_is_that_of_the_first_points_and_repeats_exactly():
    points = np.float32([[1.9, 0, 0], [-1.9, 0, 0], [1.8, 0, 0], [0, 0, 0]])
    voxelizer = Voxelizer(**SMALL)
    first, second = voxelizer(points), voxelizer(points)
    assert first.coords[:, 1].tolist() == [7, 0, 4]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_unpacks_and_has_the_types_that_sparse_tensors_need():
    features, coords, num_points = Voxelizer(**SMALL)(np.zeros((1, 5), np.float32), batch=2)
    assert features.dtype == torch.float32
    assert coords.dtype == num_points.dtype == torch.int32
    assert coords.is_contiguous()
    assert coords.tolist() == [[2, 4, 4, 2]]


def test_too_many_voxels_are_reported_not_hidden(caplog):
    caplog.set_level("WARNING", logger="bev_data")
    points = np.float32([[-1.9, 0, 0], [0, 0, 0], [1.9, 0, 0], [1.9, 0, 0], [-1.9, 0, 0]])
    got = Voxelizer(max_voxels=2, **SMALL)(points)
    assert (got.voxels_dropped, got.points_dropped, len(got)) == (1, 2, 2)
    assert got.num_points.tolist() == [2, 1]
    assert "3 voxels, but max_voxels is 2: the last 1, with 2 points" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_of_every_floating_type(dtype):
    points = torch.tensor([[0.5, 0.25, 0.0], [1.5, 0.5, 0.125]], dtype=dtype, requires_grad=True)
    features, _, _ = Voxelizer(**SMALL)(points)
    assert torch.equal(features, points.detach().float())


def test_input_is_left_alone_strided_or_not():
    points = np.arange(60, dtype=np.float32).reshape(6, 10) / 60
    view = points[::2, :5]
    before = points.copy()
    got = Voxelizer(**SMALL)(view)
    assert torch.equal(got.features, Voxelizer(**SMALL)(view.copy()).features)
    np.testing.assert_array_equal(points, before)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (np.zeros((0, 5), np.float32), "the point cloud is empty"),
        (np.zeros((4, 2), np.float32), r"shape \[4, 2\]; expected \[N, columns\]"),
        (np.zeros(5, np.float32), r"shape \[5\]"),
        (np.zeros((4, 5), np.int64), "points are int64; expected floating point"),
        (np.full((4, 5), 99.0, np.float32), r"all 4 points are outside .* x 99\.\.99"),
        (np.float32([[0, 0, 0], [0, np.nan, 0], [np.inf, 0, 0]]), "2 of 3 points .* row 1: "),
        (np.array([[1e300, 0, 0]]), "1 of 1 points hold NaN or Inf"),
    ],
)
def test_clouds_that_no_voxels_can_be_made_of(points, message):
    with pytest.raises(VoxelizeError, match=message):
        Voxelizer()(points)
    with pytest.raises(VoxelizeError, match=message):
        Voxelization()(torch.from_numpy(points))


def test_negative_batch():
    with pytest.raises(VoxelizeError, match="batch=-1"):
        Voxelizer()(np.zeros((1, 5), np.float32), batch=-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"voxel_size": (0.1, 0.1)}, "expected 3 edges and 6 bounds"),
        ({"point_cloud_range": (0, 0, 0, 1, 1)}, "expected 3 edges and 6 bounds"),
        ({"voxel_size": (0.1, 0.0, 0.1)}, "edges must be positive"),
        ({"voxel_size": (0.1, float("nan"), 0.1)}, "edges must be positive"),
        ({"point_cloud_range": (0, 0, 0, 3, 3, -1)}, "range along z, -1 m, is not a whole number"),
        ({"voxel_size": (0.07, 0.075, 0.2)}, "range along x, 108 m, is not a whole number"),
        ({"voxel_size": (0.00003, 0.075, 0.2)}, "3600000 cells along x"),
        ({"max_num_points": 0}, "max_num_points=0: must be an integer from 1"),
    ],
)
def test_grids_that_are_none(options, message):
    with pytest.raises(VoxelizeError, match=message):
        Voxelizer(**options)
    with pytest.raises(VoxelizeError, match=message):
        Voxelization(**options)


def test_limits_of_the_module():
    with pytest.raises(VoxelizeError, match="max_voxels=0"):
        Voxelizer(max_voxels=0)
    with pytest.raises(VoxelizeError, match=r"max_voxels=\(1, 2, 3\)"):
        Voxelization(max_voxels=(1, 2, 3))
    with pytest.raises(VoxelizeError, match="deterministic=False"):
        Voxelization(deterministic=False)


def test_module_prints_as_in_mit_bevfusion():
    assert repr(Voxelization()) == (
        "Voxelization(voxel_size=[0.075, 0.075, 0.2], "
        "point_cloud_range=[-54.0, -54.0, -5.0, 54.0, 54.0, 3.0], "
        "max_num_points=10, max_voxels=(120000, 160000), deterministic=True)"
    )
    assert Voxelization().state_dict() == {}
    assert Voxelization().grid_size == (1440, 1440, 40)
    assert Voxelization().sparse_shape == (1440, 1440, 41)


def test_module_takes_the_limit_of_its_mode():
    module = Voxelization(max_voxels=(1, 2), **SMALL)
    points = torch.tensor([[-1.9, 0.0, 0.0], [0.0, 0.0, 0.0], [1.9, 0.0, 0.0]])
    assert len(module.train()(points)) == 1
    assert len(module.eval()(points)) == 2
    assert len(Voxelization(max_voxels=3, **SMALL)(points)) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"voxel_size": 1}, {"voxel_size": (1, "x", 1)}, {"voxel_size": None},
        {"point_cloud_range": (0, 0, 0, 1, 1, None)}, {"max_num_points": "x"},
        {"max_num_points": True}, {"max_voxels": 1.5}, {"max_voxels": 2**63},
    ],
)  # fmt: skip
def test_settings_that_are_no_grid_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(VoxelizeError, match=next(iter(settings))):
        Voxelizer(**settings)


def test_points_of_unequal_rows_are_refused() -> None:
    rows: Any = [[1.0, 2.0, 3.0], [1.0]]
    with pytest.raises(VoxelizeError, match="points are no array"):
        Voxelizer()(rows)
