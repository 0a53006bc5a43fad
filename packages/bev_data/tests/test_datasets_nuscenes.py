"""nuScenes: a miniature made here, read with the devkit, and one real keyframe."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from nuscenes_mini import LIDAR, MOUNTS, PILLARS, Tables, camera_mount, ego_at, write_mini
from PIL import Image

from bev_data import InputError
from bev_data.cameras import CAMERA_NAMES, project
from bev_data.datasets import open_dataset

WITHOUT_DEVKIT = "nuscenes-devkit is not installed: pip install nuscenes-devkit"


@pytest.fixture
def devkit():
    return pytest.importorskip("nuscenes.nuscenes", reason=WITHOUT_DEVKIT, exc_type=ImportError)


@pytest.fixture
def root(tmp_path) -> Path:
    return write_mini(tmp_path)


def test_sweeps_meet_in_the_keyframe(devkit, root):
    frames = open_dataset("nuscenes", root)
    assert [frame.name for frame in frames] == [
        "scene-0061_00",
        "scene-0061_01",
        "scene-0103_00",
        "scene-0103_01",
    ]
    frame = frames[1]
    # Its own 61 points, and of the five earlier sweeps all but the roof.
    assert len(frame.points) == 61 + 5 * 60
    lags = np.repeat([0, 0.05, 0.1, 0.15, 0.2, 0.25], [61, 60, 60, 60, 60, 60])
    np.testing.assert_allclose(frame.points[:, 4], lags, atol=1e-6)
    assert (frame.points[:, 3] == 17).all()
    own = frame.points[:60, :3]
    for sweep in range(5):
        earlier = frame.points[61 + 60 * sweep : 121 + 60 * sweep, :3]
        np.testing.assert_allclose(earlier, own, atol=2e-5)
    assert len(open_dataset("nuscenes", root, sweeps=3)[1].points) == 61 + 2 * 60
    assert len(frames[0].points) == 61


def test_points_equal_the_devkits(devkit, root):
    classes = importlib.import_module("nuscenes.utils.data_classes")
    tables = devkit.NuScenes("v1.0-mini", str(root), verbose=False)
    frame = open_dataset("nuscenes", root, sweeps=4)[3]
    sample = tables.get("sample", "scene-0103-1")
    cloud, lags = classes.LidarPointCloud.from_file_multisweep(
        tables, sample, "LIDAR_TOP", "LIDAR_TOP", nsweeps=4
    )
    ours = np.delete(frame.points, 60, axis=0)  # the devkit drops the roof of the keyframe too
    np.testing.assert_allclose(ours[:, :4], cloud.points.T, atol=2e-5)
    np.testing.assert_allclose(ours[:, 4], lags[0], atol=1e-6)


def test_labels_equal_the_devkits(devkit, root):
    tables = devkit.NuScenes("v1.0-mini", str(root), verbose=False)
    frame = open_dataset("nuscenes", root)[3]
    sample = tables.get("sample", "scene-0103-1")
    _, boxes, _ = tables.get_sample_data(sample["data"]["LIDAR_TOP"])
    for ours, box in zip(frame.labels.boxes, boxes, strict=True):
        np.testing.assert_allclose(ours[:3], box.center, atol=1e-5)
        np.testing.assert_allclose(ours[3:6], box.wlh[[1, 0, 2]], atol=1e-6)
        along = box.rotation_matrix[:, 0]
        np.testing.assert_allclose(ours[6], np.arctan2(along[1], along[0]), atol=1e-6)
    labels = frame.labels
    assert labels.names == ("car", "pedestrian", "static_object.bicycle_rack")
    np.testing.assert_allclose(labels.visibility, np.float32([0.9, 0.2, np.nan]))
    assert labels.num_points.tolist() == [7, 8, 9]
    # Objects move along the world's x by 0, 0.5 and 1 m in a quarter of a second.
    speed = np.linalg.norm(labels.velocities, axis=1)
    np.testing.assert_allclose(speed, [0, 2, 4], atol=2e-3)  # the road climbs a little
    to_lidar = np.linalg.inv(ego_at(30.25) @ LIDAR)[:3, :3]
    np.testing.assert_allclose(labels.velocities[2], (to_lidar @ [4, 0, 0])[:2], atol=1e-5)


def test_cameras_look_where_the_devkit_says(devkit, root):
    frame = open_dataset("nuscenes", root)[1]
    assert tuple(camera.name for camera in frame.cameras) == CAMERA_NAMES
    for k, camera in enumerate(frame.cameras):
        time = 10.25 - 0.01 * k  # each camera has its own moment
        to_camera = np.linalg.inv(ego_at(time) @ camera_mount(MOUNTS[camera.name]))
        seen = PILLARS @ to_camera[:3, :3].T + to_camera[:3, 3]
        pixels, depth = project(camera, frame.points[:60])
        np.testing.assert_allclose(depth, seen[:, 2], atol=1e-4)
        ahead = seen[:, 2] > 1
        expected = seen[ahead, :2] / seen[ahead, 2:] * [60, 61] + [31, 17.5]
        np.testing.assert_allclose(pixels[ahead], expected, atol=2e-3)
        assert abs(int(camera.image[0, 0, 0]) - 40 * k) < 5


def test_class_names_are_the_devkits(devkit):
    from bev_data.datasets import NUSCENES_NAMES

    try:
        official = importlib.import_module("nuscenes.eval.detection.utils")
    except ImportError as error:
        pytest.skip(f"the devkit's evaluation cannot be imported: {error}")
    for category, name in NUSCENES_NAMES.items():
        assert official.category_to_detection_name(category) == name
    assert official.category_to_detection_name("static_object.bicycle_rack") is None


def test_classes_of_ones_own(devkit, root):
    def names(**classes):
        return open_dataset("nuscenes", root, cameras="none", classes=classes)[3].labels.names

    assert names(car="vehicle") == ("vehicle", "pedestrian", "static_object.bicycle_rack")
    own = {"static_object.bicycle_rack": "rack", "vehicle.car": "car_", "car": "unused"}
    assert names(**own) == ("car_", "pedestrian", "rack")
    with pytest.raises(InputError, match=r"renames lorry, no class of v1\.0-mini, which has vehic"):
        names(lorry="truck")


def test_scenes_and_splits(devkit, root):
    def names(**options):
        return [key[0] for key in open_dataset("nuscenes", root, **options).keys]

    assert names(split="mini_train") == ["scene-0061_00", "scene-0061_01"]
    assert names(scenes=["scene-0103"]) == ["scene-0103_00", "scene-0103_01"]
    (root / "v1.0-mini/splits.json").write_text('{"mine": ["scene-0103"]}')
    assert names(split="mine") == names(scenes=["scene-0103"])
    with pytest.raises(InputError, match=r"no split 'minee' .*mini_train"):
        names(split="minee")
    with pytest.raises(InputError, match=r"split 'test' has none of the scenes of v1\.0-mini"):
        names(split="test")
    with pytest.raises(InputError, match=r"no scene scene-9; v1\.0-mini has 2, such as scene-0061"):
        names(scenes=["scene-9"])


def edit(root, table, change):
    path = root / "v1.0-mini" / f"{table}.json"
    rows = json.loads(path.read_text())
    change(rows)
    path.write_text(json.dumps(rows))


def test_missing_pieces(devkit, root):
    with pytest.raises(InputError, match=r"v1.0-trainval: no such folder .* has v1.0-mini"):
        open_dataset("nuscenes", root, version="v1.0-trainval")
    (root / "sweeps/lidar_10.15.pcd.bin").unlink()
    with pytest.raises(InputError, match="no such sweep; unpack it, or read fewer with sweeps=1"):
        open_dataset("nuscenes", root)[1]
    assert len(open_dataset("nuscenes", root, sweeps=1)[1].points) == 61
    (root / "samples/CAM_BACK_10.22.jpg").unlink()
    with pytest.raises(InputError, match=r"CAM_BACK_10\.22\.jpg: no such image"):
        open_dataset("nuscenes", root, sweeps=1)[1]
    assert open_dataset("nuscenes", root, sweeps=1, cameras="none")[1].cameras == ()
    Image.new("RGB", (32, 18)).save(root / "samples/CAM_BACK_9.97.jpg")
    with pytest.raises(InputError, match="is 32x18, but its calibration is for 64x36"):
        open_dataset("nuscenes", root)[0]
    (root / "v1.0-mini/sample.json").unlink()
    with pytest.raises(InputError, match=r"the devkit cannot read the tables .*FileNotFound"):
        open_dataset("nuscenes", root)


def test_missing_cameras_and_calibration(devkit, root):
    edit(
        root,
        "sample_data",
        lambda rows: rows.remove(next(row for row in rows if row["token"] == "CAM_BACK@9970000")),
    )
    with pytest.raises(InputError, match="scene-0061_00: the sample has no CAM_BACK; its tables"):
        open_dataset("nuscenes", root)[0]
    edit(root, "calibrated_sensor", lambda rows: rows[2].update(camera_intrinsic=[]))
    with pytest.raises(InputError, match=r"CAM_FRONT_RIGHT: intrinsics must be .*\[3, 3\]"):
        open_dataset("nuscenes", root)[1]


def test_the_extra_is_named(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "nuscenes.nuscenes", None)
    with pytest.raises(InputError, match=r"pip install nuscenes-devkit"):
        open_dataset("nuscenes", root)


def test_the_real_keyframe_through_the_devkit(devkit, keyframe_info, tmp_path):
    """Real images and calibration, written as tables, give mmdetection3d's own projections back."""
    info, tables = keyframe_info, Tables(tmp_path)
    ego = np.array(info["ego2global"])
    lidar = np.array(info["lidar_points"]["lidar2ego"])
    time = round(info["timestamp"] * 1e6)
    tables.sensor("LIDAR_TOP", lidar, [])
    (tmp_path / "samples").symlink_to(info["folder"])
    file = f"samples/{info['lidar_points']['lidar_path']}"
    tables.data("LIDAR_TOP", "s", time, ego, file, key=True)
    for name, record in info["images"].items():
        mount = np.array(record["cam2ego"])
        # The record has the whole motion; what is left is the car's own, at the exposure.
        moment = ego @ lidar @ np.linalg.inv(record["lidar2cam"]) @ np.linalg.inv(mount)
        tables.sensor(name, mount, record["cam2img"])
        image, taken = f"samples/{record['img_path']}", round(record["timestamp"] * 1e6)
        tables.data(name, "s", taken, moment, image, key=True, size=(1600, 900))
    tables.add("sample", "s", timestamp=time, scene_token="scene", prev="", next="")
    tables.add(
        "scene",
        "scene",
        log_token="log",
        nbr_samples=1,
        first_sample_token="s",
        last_sample_token="s",
        name="scene-0061",
        description="",
    )
    (frame,) = open_dataset("nuscenes", tables.write(), split="mini_train")
    assert frame.points.shape == (34688, 5)
    assert len(frame.labels.boxes) == 0
    for camera in frame.cameras:
        record = info["images"][camera.name]
        np.testing.assert_allclose(camera.lidar_to_camera, record["lidar2cam"], atol=2e-5)
        np.testing.assert_array_equal(camera.intrinsics, record["cam2img"])
        assert camera.image.shape == (900, 1600, 3)
