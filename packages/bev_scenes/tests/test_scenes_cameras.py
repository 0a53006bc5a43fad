"""Pictures of the street against the LiDAR, against a plain projection, and against themselves."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest

from bev_data.cameras import CAMERA_NAMES
from bev_scenes import (
    RIGS,
    CameraMount,
    CameraRig,
    SpinningLidar,
    build_street,
    render_street,
    scan_street,
    scanner_pose,
    street_frame,
)
from bev_scenes import _render as render_module

GROUND, SKY = -1, -2
FEW = {"size": "tiny", "beams": 8, "sweeps": 1, "azimuth_steps": 90}


def pictures(seed, rig, **options):
    street = build_street(seed)
    return street, render_street(street, rig, scanner_pose(street, 1.84), seed=seed, **options)


def project(camera, points):
    """Pixel columns, rows and depths of points; written out again on purpose."""
    x, y, z = (camera.lidar_to_camera[:3, :3] @ points.T).T.T + camera.lidar_to_camera[:3, 3:]
    u = camera.intrinsics[0, 0] * x / z + camera.intrinsics[0, 2]
    v = camera.intrinsics[1, 1] * y / z + camera.intrinsics[1, 2]
    return np.floor(u), np.floor(v), z


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_returns_fall_on_their_object_in_the_picture(seed, beside):
    rig = RIGS["nuscenes"].resized(800, 450)
    if not beside:  # the cameras see exactly what the LiDAR sees
        rig = CameraRig(tuple(replace(mount, position=(0.0, 0.0, 0.0)) for mount in rig.cameras))
    street, seen = pictures(seed, rig)
    lidar = SpinningLidar(range_noise=0.0, azimuth_steps=360)
    scan = scan_street(street, lidar, sweeps=1, seed=seed)
    leaves = {k for k, thing in enumerate(street.objects) if thing.name in ("tree", "hedge")}
    hits, tries, met = 0, 0, set()
    for picture in seen:
        u, v, depth = project(picture.camera, scan.points[:, :3].astype(np.float64))
        inside = (depth > 1.0) & (u >= 1) & (v >= 1) & (u < 799) & (v < 449)
        for i, j, owner in zip(
            u[inside].astype(int), v[inside].astype(int), scan.objects[inside], strict=True
        ):
            around = picture.objects[j - 1 : j + 2, i - 1 : i + 2]
            if (around != around[1, 1]).any() or {int(owner), int(around[1, 1])} & leaves:
                continue  # outlines; and every ray gets into leaves to another depth
            if owner >= 0 and street.objects[owner].labelled:
                met.add(int(owner))
            tries += 1
            hits += around[1, 1] == owner
    assert tries > 2000
    assert len(met) >= 8
    # The LiDAR on the roof sees over some edges that hide things from the cameras.
    assert hits / tries > (0.93 if beside else 0.999)


def test_an_object_appears_where_its_box_is_projected():
    street, seen = pictures(1, RIGS["nuscenes"].resized(400, 225))
    scan = scan_street(street, SpinningLidar(), sweeps=1, seed=1)
    listed = [k for k in np.unique(scan.objects[scan.objects >= 0]) if street.objects[k].labelled]
    checked = 0
    for k, box in zip(listed, scan.labels.boxes.astype(np.float64), strict=True):
        signs = np.array(np.meshgrid(*[[-0.5, 0.5]] * 3)).reshape(3, -1).T * box[3:6]
        c, s = math.cos(box[6]), math.sin(box[6])
        corners = signs @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]]) + box[:3]
        for picture in seen:
            u, v, depth = project(picture.camera, corners)
            rows, columns = np.nonzero(picture.objects == k)
            if len(rows) < 30 or depth.min() < 0.5:
                continue
            checked += 1
            assert u.min() - 1 <= columns.min()
            assert columns.max() <= u.max() + 1
            assert v.min() - 1 <= rows.min()
            assert rows.max() <= v.max() + 1
    assert checked > 8


def test_pruning_by_tile_changes_nothing(monkeypatch):
    rig = RIGS["nuscenes"].resized(48, 27)
    _, fast = pictures(4, rig)
    rectangles = render_module.screen_rectangles

    def whole_picture(*arguments):
        return np.broadcast_to(np.array([0.0, 47.0, 0.0, 26.0]), rectangles(*arguments).shape) + 0.0

    monkeypatch.setattr(render_module, "screen_rectangles", whole_picture)
    monkeypatch.setattr(
        render_module._Scene,
        "_shadow_cells",
        lambda self: np.tile(np.array([0, 10**6] * 2), (len(self.centre), 1)),
    )
    _, slow = pictures(4, rig)
    for a, b in zip(fast, slow, strict=True):
        np.testing.assert_array_equal(a.objects, b.objects)
        np.testing.assert_array_equal(a.camera.image, b.camera.image)


@pytest.mark.bits
def test_any_number_of_threads_gives_the_same_bits():
    one = street_frame(2, cameras="tiny", threads=1, **FEW)
    three = street_frame(2, cameras="tiny", threads=3, **FEW)
    for a, b in zip(one.cameras, three.cameras, strict=True):
        assert a.image.tobytes() == b.image.tobytes()
    assert one.points.tobytes() == three.points.tobytes()


def test_pictures_follow_the_seed():
    rig = RIGS["nuscenes"].resized(32, 18)
    first, again, other = (street_frame(k, cameras=rig, **FEW).cameras[0] for k in (5, 5, 6))
    assert first.image.tobytes() == again.image.tobytes()
    assert first.image.tobytes() != other.image.tobytes()


def test_rigs_look_as_nuscenes_does():
    for name, (width, height) in {"nuscenes": (1600, 900), "tiny": (320, 180)}.items():
        mounts = RIGS[name].cameras
        assert tuple(mount.name for mount in mounts) == CAMERA_NAMES
        assert {(mount.width, mount.height) for mount in mounts} == {(width, height)}
        scale = width / 1600
        for mount in mounts:
            focal = 809 if mount.name == "CAM_BACK" else 1266
            assert abs(mount.intrinsics[0, 0] - focal * scale) < 1.5 * scale
            turn = mount.lidar_to_camera[:3, :3]
            np.testing.assert_allclose(turn @ turn.T, np.eye(3), atol=1e-11)
            assert abs(np.linalg.det(turn) - 1) < 1e-11
    ahead = {mount.name: mount.axes[2] for mount in RIGS["nuscenes"].cameras}
    assert ahead["CAM_FRONT"][1] == 1
    assert ahead["CAM_BACK"][1] == -1
    assert ahead["CAM_FRONT_RIGHT"][0] > 0.7 < -ahead["CAM_FRONT_LEFT"][0]
    assert ahead["CAM_BACK_RIGHT"][0] > 0.7 < -ahead["CAM_BACK_LEFT"][0]


def test_pitch_and_yaw_turn_the_view():
    up = CameraMount("UP", (0, 0, 0), 0.0, 30.0, 90.0, 64, 64)
    left = CameraMount("LEFT", (0, 0, 0), 90.0, 0.0, 90.0, 64, 64)
    np.testing.assert_allclose(up.axes[2], [0, math.cos(math.pi / 6), 0.5], atol=1e-9)
    np.testing.assert_allclose(left.axes[2], [-1, 0, 0], atol=1e-9)
    _, (high, level) = pictures(
        0, CameraRig((up, CameraMount("LEVEL", (0, 0, 0), 0.0, 0.0, 90.0, 64, 64)))
    )
    assert (high.objects == SKY).mean() > (level.objects == SKY).mean() + 0.2


def test_the_picture_holds_a_street():
    street, seen = pictures(0, RIGS["tiny"])
    names = set()
    for picture in seen:
        image = picture.camera.image.astype(float)
        assert image.std() > 20  # not flat
        assert (image.reshape(-1, 3).max(0) < 256).all()
        sky = image[picture.objects == SKY]
        assert (sky[:, 2] > sky[:, 0] - 12).all()  # blue or white
        shown, count = np.unique(picture.objects, return_counts=True)
        assert set(shown) & {GROUND}
        names |= {street.objects[k].name for k, n in zip(shown, count, strict=True) if k >= 0}
    assert {"building", "car", "pedestrian", "tree", "lamp"} <= names


def test_shadows_lie_beside_things_away_from_the_sun():
    mount = CameraMount("DOWN", (0.0, 0.0, 40.0), 0.0, -89.9, 60.0, 240, 240)
    _, (picture,) = pictures(0, CameraRig((mount,)))
    image = picture.camera.image.astype(float).mean(2)
    ground = image[picture.objects == GROUND]
    dark = (ground < 0.75 * np.median(ground)).mean()
    assert 0.02 < dark < 0.6


def test_frame_without_cameras_and_with_a_rig_of_ones_own():
    assert street_frame(0, **FEW).cameras == ()
    rig = CameraRig((CameraMount("ONLY", (0.0, 1.0, 0.0), 0.0, -5.0, 60.0, 40, 30),))
    (camera,) = street_frame(0, cameras=rig, **FEW).cameras
    assert (camera.name, camera.image.shape) == ("ONLY", (30, 40, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cameras": "kitti"}, "cameras='kitti': unknown; expected one of nuscenes, tiny"),
        ({"size": "huge"}, "size='huge': unknown; expected one of nuscenes, tiny"),
        ({"threads": 0}, "threads=0"),
    ],
)
def test_names_that_nothing_has(options, message):
    with pytest.raises(ValueError, match=message):
        street_frame(0, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"fov": 180.0}, "fov"), ({"width": 0}, "no pixels"), ({"pitch": 90.0}, "pitch")],
)
def test_mounts_that_are_none(change, message):
    given = {"yaw": 0.0, "pitch": 0.0, "fov": 60.0, "width": 8, "height": 6} | change
    with pytest.raises(ValueError, match=message):
        CameraMount("CAM", (0.0, 0.0, 0.0), **given)


def test_rigs_that_are_none():
    mount = CameraMount("CAM", (0.0, 0.0, 0.0), 0.0, 0.0, 60.0, 8, 6)
    for cameras in ((), (mount, mount)):
        with pytest.raises(ValueError, match="expected at least one"):
            CameraRig(cameras)


@pytest.mark.bits
def test_picture_bits_are_the_same_on_every_machine():
    cameras = street_frame(1, cameras=RIGS["nuscenes"].resized(64, 36), **FEW).cameras
    digest = hashlib.sha256(b"".join(camera.image.tobytes() for camera in cameras)).hexdigest()
    assert digest == "dfd8ed3db19e2bc949db24d966dfda30095c095f22032c7d971847d892345c6a"
