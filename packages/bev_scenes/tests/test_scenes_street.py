from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from bev_data.voxelize import Voxelizer
from bev_scenes import (
    EgoPath,
    Material,
    SceneObject,
    SceneSettings,
    Shape,
    Solid,
    SpinningLidar,
    Street,
    build_street,
    scan_street,
    street_frame,
)
from bev_scenes import _scan as scan_module

SMALL = {"beams": 16, "azimuth_steps": 180, "sweeps": 3}


def test_default_frame_is_a_whole_nuscenes_like_one():
    frame = street_frame()
    points = frame.points
    assert frame.name == "street_0"
    assert 200_000 < len(points) < 320_000
    assert np.isfinite(points).all()
    assert np.hypot(points[:, 0], points[:, 1]).max() < 75
    assert (points[:, 3] == np.round(points[:, 3])).all()
    assert points[:, 3].min() >= 0
    assert points[:, 3].max() == 255
    lags = np.unique(points[:, 4])
    np.testing.assert_allclose(lags, np.arange(10) * 0.05, atol=1e-7)
    assert {"car", "pedestrian", "traffic_cone"} <= set(frame.labels.names)
    voxels = Voxelizer()(points)
    assert 50_000 < len(voxels) < 120_000
    assert voxels.voxels_dropped == 0


@pytest.mark.bits
def test_same_seed_same_bits_other_seed_other_street():
    first, again = street_frame(3, **SMALL), street_frame(3, **SMALL)
    other = street_frame(4, **SMALL)
    assert first.points.tobytes() == again.points.tobytes()
    assert first.labels.boxes.tobytes() == again.labels.boxes.tobytes()
    assert first.labels.names == again.labels.names
    assert first.points.tobytes() != other.points.tobytes()
    noise = street_frame(3, scan_seed=9, **SMALL)
    assert noise.points.tobytes() != first.points.tobytes()


@pytest.mark.bits
def test_bits_are_the_same_on_every_machine():
    frame = street_frame(1, **SMALL)
    digest = hashlib.sha256(frame.points.tobytes() + frame.labels.boxes.tobytes()).hexdigest()
    assert digest == "b70cb2aa6e6338b90dc3f4a3e3d9c41b8187a53f9cb9cf6b42e7b5d4190b3c1c"


def test_generator_leaves_the_global_random_state_alone():
    np.random.seed(1)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    street_frame(0, **SMALL)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def local(points, box):
    offset = points[:, :3].astype(np.float64) - box[:3]
    c, s = math.cos(box[6]), math.sin(box[6])
    return np.stack(
        [offset[:, 0] * c + offset[:, 1] * s, offset[:, 1] * c - offset[:, 0] * s, offset[:, 2]], 1
    )


@pytest.mark.parametrize("seed", range(3))
def test_points_of_an_object_lie_in_its_box(seed):
    street = build_street(seed)
    scan = scan_street(street, SpinningLidar(range_noise=0.0, azimuth_steps=540), seed=seed)
    seen = [k for k in np.unique(scan.objects[scan.objects >= 0]) if street.objects[k].labelled]
    assert len(seen) == len(scan.labels.names)
    labels = scan.labels
    for k, box, name, velocity, count in zip(
        seen, labels.boxes, labels.names, labels.velocities, labels.num_points, strict=True
    ):
        points = scan.points[scan.objects == k]
        assert name == street.objects[k].name
        assert count == len(points)
        points = points.copy()  # where they would be had the object stood still
        points[:, :2] += velocity * points[:, 4:5]
        beyond = np.abs(local(points, box)) - box[3:6] / 2
        assert beyond[:, :2].max() < 0.01, (name, beyond.max(axis=0))
        now = points[:, 4] == 0
        assert beyond[now].max(initial=0.0) < 0.01, (name, beyond[now].max(axis=0))
        assert beyond[:, 2].max() < 0.25, (name, beyond.max(axis=0))  # it drove up or down a slope


@pytest.mark.parametrize("seed", range(2))
def test_boxes_are_tight(seed):
    # A ring of scanners around each object sees it from all sides: its returns fill its box.
    street = build_street(seed)
    lidar = SpinningLidar(
        range_noise=0.0, azimuth_steps=900, beams=64, elevation=(-40.0, 20.0), height=1.2
    )
    checked: set[str] = set()
    for thing in street.objects:
        if not thing.labelled or thing.name in checked:
            continue
        checked.add(thing.name)
        low, high = np.full(3, np.inf), np.full(3, -np.inf)
        for turn in range(8):
            way = 2 * math.pi * turn / 8 + 0.3
            ego = EgoPath(
                thing.x + 6.0 * math.cos(way), thing.y + 6.0 * math.sin(way), math.pi / 2, 0.0, 0.0
            )
            seen = scan_street(Street(street.ground, (thing,), ego), lidar, sweeps=1)
            if not seen.labels.names:
                continue
            box = seen.labels.boxes[0].astype(np.float64)
            mine = local(seen.points[seen.objects == 0], box)
            low, high = np.minimum(low, mine.min(0)), np.maximum(high, mine.max(0))
        assert ((high - low) < box[3:6] + 0.02).all(), thing.name
        assert ((high - low) > box[3:6] - 0.2).all(), (thing.name, high - low, box[3:6])
    assert {"car", "pedestrian", "truck"} <= checked


@pytest.mark.parametrize("seed", range(6))
def test_labelled_objects_do_not_stand_in_one_another(seed):
    street = build_street(seed)

    def corners(thing):
        length, width = thing.size[0] * 0.9, thing.size[1] * 0.9
        c, s = math.cos(thing.yaw), math.sin(thing.yaw)
        signs = np.array([[1, 1], [1, -1], [-1, -1], [-1, 1]]) / 2
        u, v = signs[:, 0] * length, signs[:, 1] * width
        return np.stack([thing.x + u * c - v * s, thing.y + u * s + v * c], 1)

    def apart(a, b):
        for shape in (a, b):
            for edge in np.roll(shape, -1, 0) - shape:
                normal = np.array([-edge[1], edge[0]])
                u, v = a @ normal, b @ normal
                if u.max() < v.min() or v.max() < u.min():
                    return True
        return False

    things = [thing for thing in street.objects if thing.labelled]
    solid = things + [thing for thing in street.objects if thing.name == "building"]
    for a, b in itertools.product(things, solid):
        if a is not b:
            assert apart(corners(a), corners(b)), (a.name, a.x, a.y, b.name, b.x, b.y)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_stands_where_the_scanner_drives(seed):
    street = build_street(seed)
    for lag in np.arange(10) * 0.05:
        x, y, _ = street.ego.at(-lag)
        for thing in street.objects:
            if thing.labelled:
                ox, oy = thing.at(-lag)
                assert math.hypot(ox - x, oy - y) > 1.5, (thing.name, ox, oy)


def test_pruning_by_column_changes_nothing(monkeypatch):
    street, lidar = build_street(2), SpinningLidar(beams=8, azimuth_steps=120)
    pruned = scan_street(street, lidar, sweeps=2)
    fast = scan_module.columns_of

    def all_columns(centre, solids, phase, step):
        order, near, first, _ = fast(centre, solids, phase, step)
        return order, np.zeros_like(near), np.zeros_like(first), np.full_like(first, 119)

    monkeypatch.setattr(scan_module, "columns_of", all_columns)
    assert scan_street(street, lidar, sweeps=2).points.tobytes() == pruned.points.tobytes()


def test_still_things_stay_put_from_sweep_to_sweep():
    street = build_street(0)
    scan = scan_street(street, SpinningLidar(range_noise=0.0))
    walls = [k for k, thing in enumerate(street.objects) if thing.name == "building"]
    moved = 0.0
    for k in walls:
        mine = scan.points[(scan.objects == k) & (scan.materials == Material.FACADE)]
        new, old = mine[mine[:, 4] == 0], mine[mine[:, 4] > 0.4]
        front = np.abs(new[:, 0]).min(initial=np.inf)
        if len(new) > 300 and len(old) > 300:
            moved = max(moved, abs(np.abs(old[:, 0]).min() - front))
            assert abs(np.abs(old[:, 0]).min() - front) < 0.25
    assert moved > 0.0  # at least one wall was compared


def test_scanner_pose_and_ground():
    frame = street_frame(0)
    near = frame.points[np.hypot(frame.points[:, 0], frame.points[:, 1]) < 4.0]
    assert abs(np.median(near[:, 2]) + 1.84) < 0.15


def test_reflectors_are_brighter_than_roads():
    scan = scan_street(build_street(0))
    mean = {m: scan.points[scan.materials == m, 3].mean() for m in np.unique(scan.materials)}
    assert mean[Material.ASPHALT] < 20 < mean[Material.MARKING] < mean[Material.RETROREFLECTOR]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed=-1: must not be negative"),
        ({"sweeps": 0}, "sweeps=0"),
        ({"beams": 0}, "beams=0"),
        ({"azimuth_steps": 3}, "azimuth_steps=3"),
        ({"max_range": 0.5}, r"max_range=0\.5"),
        ({"scan_seed": -2}, "seed=-2"),
    ],
)
def test_numbers_that_make_no_frame(options, message):
    with pytest.raises(ValueError, match=message):
        street_frame(**options)


def test_scanners_that_are_none():
    with pytest.raises(ValueError, match="elevation"):
        SpinningLidar(elevation=(10.0, -10.0))
    with pytest.raises(ValueError, match="range_noise"):
        SpinningLidar(range_noise=-0.1)


def test_visibility_is_the_share_of_the_silhouette_that_is_seen():
    # A van behind a wall that covers its left half, and the same van without the wall.
    def share(*walls):
        ego = EgoPath(0.0, 0.0, math.pi / 2, 0.0, 0.0)
        van = SceneObject(
            "truck", 0.0, 20.0, 0.0, (6.0, 2.0, 2.0),
            (Solid(Shape.BOX, (0, 0, 1.0), (6.0, 2.0, 2.0), Material.METAL),), labelled=True,
        )  # fmt: skip
        ground = replace(
            build_street(0).ground, slope_x=0.0, slope_y=0.0, crown=0.0, curb=0.0,
            half_width=50.0, bumps=np.zeros((91, 91)),
        )  # fmt: skip
        scan = scan_street(Street(ground, (van, *walls), ego), SpinningLidar(), sweeps=2)
        return float(scan.labels.visibility[0])

    def wall(x, width):
        solid = Solid(Shape.BOX, (0, 0, 2.0), (width, 0.1, 8.0), Material.WALL)
        return SceneObject("wall", x, 10.0, 0.0, (width, 0.1, 8.0), (solid,))

    assert share() == 1.0
    assert abs(share(wall(-5.0, 10.0)) - 0.5) < 0.06
    assert abs(share(wall(-5.75, 10.0)) - 0.75) < 0.06


def test_labels_say_how_fast_how_visible_and_how_many():
    labels = street_frame(0, **SMALL).labels
    count = len(labels.names)
    assert labels.velocities.shape == (count, 2)
    assert labels.visibility.shape == labels.num_points.shape == (count,)
    assert (labels.num_points > 0).all()
    assert ((labels.visibility >= 0) & (labels.visibility <= 1)).all()
    assert (labels.visibility < 0.5).any()
    assert (labels.visibility > 0.95).any()
    speed = np.hypot(*labels.velocities.T)
    assert speed.max() < 11
    walkers = speed[[name == "pedestrian" for name in labels.names]]
    assert 0.5 < np.median(walkers) < 2.0


def test_tiny_size_scans_less():
    tiny, full = street_frame(0, size="tiny"), street_frame(0)
    assert len(tiny.points) * 4 < len(full.points)
    assert len(np.unique(tiny.points[:, 4])) == 3
    own = SceneSettings(beams=4, sweeps=1, azimuth_steps=45)
    assert len(street_frame(0, size=own).points) < 4 * 45
    assert (
        street_frame(0, size=own).points.tobytes()
        == street_frame(0, beams=4, sweeps=1, azimuth_steps=45).points.tobytes()
    )
