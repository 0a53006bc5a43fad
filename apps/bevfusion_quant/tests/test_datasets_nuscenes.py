"""nuScenes: a miniature made here, read with the devkit, and one real keyframe."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bevfusion_quant._errors import InputError
from bevfusion_quant.cameras import CAMERA_NAMES, project
from bevfusion_quant.datasets import open_dataset

WITHOUT_DEVKIT = "nuscenes-devkit is not installed: pip install 'bevfusion-quant[nuscenes]'"
SPEED = 5.0  # of the car [m/s]
STEP = 0.05  # between sweeps [s]


@pytest.fixture
def devkit():
    return pytest.importorskip("nuscenes.nuscenes", reason=WITHOUT_DEVKIT, exc_type=ImportError)


def quaternion(turn: np.ndarray) -> list[float]:
    """w, x, y, z of a rotation that is no half turn."""
    w = np.sqrt(max(0.0, 1 + np.trace(turn))) / 2
    if w < 1e-3:
        vector = np.linalg.eigh((turn + turn.T) / 2)[1][:, 2]
        return [0.0, *vector]
    off = turn - turn.T
    return [w, off[2, 1] / (4 * w), off[0, 2] / (4 * w), off[1, 0] / (4 * w)]


def about_z(angle: float, *shift: float) -> np.ndarray:
    motion = np.eye(4)
    motion[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    motion[:3, 3] = shift
    return motion


class Tables:
    """The tables of a data set in nuScenes' format."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rows: dict[str, list[dict]] = {
            name: []
            for name in (
                "category attribute visibility instance sensor calibrated_sensor ego_pose log "
                "scene sample sample_data sample_annotation map"
            ).split()
        }
        for level in "1234":
            self.add("visibility", level, level=level, description="")
        (root / "maps").mkdir(parents=True)
        Image.new("L", (4, 4)).save(root / "maps/map.png")
        self.add("map", "map", log_tokens=["log"], category="semantic", filename="maps/map.png")
        self.add("log", "log", logfile="", vehicle="", date_captured="", location="nowhere")

    def add(self, table: str, token: str, **values: object) -> str:
        self.rows[table].append({"token": token, **values})
        return token

    def pose(self, table: str, token: str, motion: np.ndarray, **values: object) -> str:
        return self.add(
            table,
            token,
            rotation=quaternion(motion[:3, :3]),
            translation=motion[:3, 3].tolist(),
            **values,
        )

    def sensor(self, channel: str, motion: np.ndarray, intrinsics: list) -> None:
        modality = "camera" if channel.startswith("CAM") else "lidar"
        self.add("sensor", channel, channel=channel, modality=modality)
        self.pose(
            "calibrated_sensor", channel, motion, sensor_token=channel, camera_intrinsic=intrinsics
        )

    def data(self, channel, sample, time, ego, filename, *, key, prev="", size=(0, 0)) -> str:
        token = f"{channel}@{time}"
        self.pose("ego_pose", token, ego, timestamp=time)
        return self.add(
            "sample_data",
            token,
            sample_token=sample,
            ego_pose_token=token,
            calibrated_sensor_token=channel,
            timestamp=time,
            fileformat=filename.rpartition(".")[2],
            is_key_frame=key,
            height=size[1],
            width=size[0],
            filename=filename,
            prev=prev,
            next="",
        )

    def write(self, version: str = "v1.0-mini") -> Path:
        (self.root / version).mkdir(exist_ok=True)
        for name, rows in self.rows.items():
            (self.root / version / f"{name}.json").write_text(json.dumps(rows))
        return self.root


LIDAR = about_z(-np.pi / 2 + 0.01, 0.94, 0.0, 1.84)
LOOK = np.array([[0.0, 0, 1], [-1, 0, 0], [0, -1, 0]])  # camera axes of one that looks along x
MOUNTS = dict(zip(CAMERA_NAMES, (0.0, -0.96, 0.96, 3.1, 1.92, -1.92), strict=True))
PILLARS = np.random.default_rng(3).uniform([-30, -30, 0], [40, 30, 4], (60, 3))  # in the world


def ego_at(time: float) -> np.ndarray:
    """Where the car is [time in s]: it drives and turns, and the road climbs."""
    motion = about_z(0.4 + 0.2 * time, SPEED * time, 0.3 * SPEED * time, 0.05 * SPEED * time)
    motion[:3, :3] = motion[:3, :3] @ rotation_x(0.02)
    return motion


def rotation_x(angle: float) -> np.ndarray:
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[1, 0, 0], [0, c, -s], [0, s, c]])


def camera_mount(angle: float) -> np.ndarray:
    motion = about_z(angle, 1.2 * np.cos(angle), 0.6 * np.sin(angle), 1.5)
    motion[:3, :3] = motion[:3, :3] @ LOOK @ rotation_x(0.01)
    return motion


@pytest.fixture
def root(tmp_path) -> Path:
    """Two scenes of two keyframes each; before a keyframe four sweeps, the first scene's none."""
    tables = Tables(tmp_path)
    tables.sensor("LIDAR_TOP", LIDAR, [])
    (tmp_path / "samples").mkdir()
    (tmp_path / "sweeps").mkdir()
    for name, angle in MOUNTS.items():
        tables.sensor(name, camera_mount(angle), [[60.0, 0, 31], [0, 61, 17.5], [0, 0, 1]])
    for category in ("vehicle.car", "human.pedestrian.adult", "static_object.bicycle_rack"):
        tables.add("category", category, name=category, description="")
    for scene, start in (("scene-0061", 10.0), ("scene-0103", 30.0)):
        samples = [f"{scene}-{number}" for number in range(2)]
        previous = ""
        for number, sample in enumerate(samples):
            now = start + 0.25 * number
            tables.add(
                "sample",
                sample,
                timestamp=round(now * 1e6),
                scene_token=scene,
                prev=samples[0] if number else "",
                next="" if number else samples[1],
            )
            for back in range(4 if number else 0, -1, -1):
                time = now - STEP * back
                to_lidar = np.linalg.inv(ego_at(time) @ LIDAR)
                seen = PILLARS @ to_lidar[:3, :3].T + to_lidar[:3, 3]
                # One point of the car's own roof, which is left out of earlier sweeps.
                rows = np.c_[np.r_[seen, [[0.5, -0.9, -0.2]]], np.full(61, 17), np.arange(61) % 32]
                name = f"{'sweeps' if back else 'samples'}/lidar_{time:.2f}.pcd.bin"
                rows.astype("<f4").tofile(tmp_path / name)
                previous = tables.data(
                    "LIDAR_TOP",
                    sample,
                    round(time * 1e6),
                    ego_at(time),
                    name,
                    key=back == 0,
                    prev=previous,
                )
            for k, channel in enumerate(CAMERA_NAMES):
                time = now - 0.01 * k
                name = f"samples/{channel}_{time:.2f}.jpg"
                Image.new("RGB", (64, 36), (40 * k, 0, 0)).save(tmp_path / name)
                moment = (round(time * 1e6), ego_at(time), name)
                tables.data(channel, sample, *moment, key=True, size=(64, 36))
        for k, (category, level) in enumerate(
            [
                ("vehicle.car", "4"),
                ("human.pedestrian.adult", "1"),
                ("static_object.bicycle_rack", ""),
            ]
        ):
            instance = tables.add("instance", f"{scene}/{k}", category_token=category)
            for number, sample in enumerate(samples):
                tables.pose(
                    "sample_annotation",
                    f"{instance}/{number}",
                    about_z(0.3 * k, 12.0 + 0.5 * number * k, 5.0 * k, 1.0),
                    sample_token=sample,
                    instance_token=instance,
                    visibility_token=level,
                    attribute_tokens=[],
                    size=[1.9, 4.5 - k, 1.6],
                    prev=f"{instance}/0" if number else "",
                    next="" if number else f"{instance}/1",
                    num_lidar_pts=7 + k,
                    num_radar_pts=0,
                )
        tables.add(
            "scene",
            scene,
            log_token="log",
            nbr_samples=2,
            first_sample_token=samples[0],
            last_sample_token=samples[1],
            name=scene,
            description="",
        )
    return tables.write()


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
    from bevfusion_quant.datasets._names import NUSCENES_NAMES

    try:
        official = importlib.import_module("nuscenes.eval.detection.utils")
    except ImportError as error:
        pytest.skip(f"the devkit's evaluation cannot be imported: {error}")
    for category, name in NUSCENES_NAMES.items():
        assert official.category_to_detection_name(category) == name
    assert official.category_to_detection_name("static_object.bicycle_rack") is None


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
    with pytest.raises(InputError, match=r"pip install 'bevfusion-quant\[nuscenes\]'"):
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
