from __future__ import annotations

import io
import json
import logging

import numpy as np
import pytest
from PIL import Image

from bev_data import InputError
from bev_data.cameras import CAMERA_NAMES, project
from bev_data.datasets import open_dataset

OWN = ("front", "front_right", "front_left", "back", "left", "right")
# A camera that looks along the car's x, 1.6 m above the ground and 0.8 m ahead.
AHEAD = [[0, 0, 1, 0.8], [-1, 0, 0, 0], [0, -1, 0, 1.6], [0, 0, 0, 1]]


@pytest.fixture(scope="module")
def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (1920, 1080)).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture
def root(tmp_path, picture):
    root = tmp_path / "street_compact"
    root.mkdir()
    points = np.array([[9, -2, 1, 40, -0.05], [-3, 8, 0.2, 7, 0]], np.float32)
    boxes = np.array([[9, -2, 1, 4, 2, 1.5, 0.25], [-3, 8, 0, 1, 1, 2, 3]], np.float32)
    intrinsics, frames = {}, {}
    for own in OWN:
        intrinsics[f"{own}_camera"] = {"fx": 950.0, "fy": 940.0, "cx": 970.0, "cy": 500.0}
        (tmp_path / "street/camera" / f"{own}_camera").mkdir(parents=True)
    for name in ("00", "02"):
        np.savez(
            root / f"frame_{name}.npz", points=points, boxes=boxes, names=["Pickup Truck", "Signs"]
        )
        frames[name] = {"cams": {f"{own}_camera": {"cam2ego": AHEAD, "ts": 0.0} for own in OWN}}
        for own in OWN:
            path = tmp_path / "street/camera" / f"{own}_camera" / f"{name}.jpg"
            path.write_bytes(picture)
    (root / "calib.json").write_text(json.dumps({"intrinsics": intrinsics, "frames": frames}))
    return root


def test_everything_lands_in_our_frame(root):
    frames = open_dataset("pandaset", root)
    assert len(frames) == 2
    frame = frames[0]
    np.testing.assert_allclose(frame.points[0], [2, 9, 1 - 1.49, 40, 0.05], rtol=1e-6)
    expected = [[2, 9, -0.49, 4, 2, 1.5, 0.25 + np.pi / 2], [-8, -3, -1.49, 1, 1, 2, None]]
    expected[1][6] = 3 + np.pi / 2 - 2 * np.pi
    np.testing.assert_allclose(frame.labels.boxes, expected, rtol=1e-5)
    assert frame.labels.names == ("truck", "Signs")
    assert frame.labels.num_points.tolist() == [1, 1]
    assert tuple(camera.name for camera in frame.cameras) == CAMERA_NAMES
    pixels, depth = project(frame.cameras[0], frame.points)
    np.testing.assert_allclose(depth, [9 - 0.8, -3.8], rtol=1e-6)
    np.testing.assert_allclose(pixels[0], [970 + 950 * 2 / 8.2, 500 + 940 * 0.6 / 8.2], rtol=1e-6)
    low = open_dataset("pandaset", root, origin_height=0.0)[0]
    assert low.points[0, 2] == 1
    np.testing.assert_allclose(project(low.cameras[0], low.points)[0], pixels, rtol=1e-5)


def test_frames_without_images(root, caplog):
    images = root.parent / "street/camera"
    (images / "left_camera/02.jpg").unlink()
    with pytest.raises(InputError, match=r"1 of 2 .* frame 02 lacks left_camera/02\.jpg; add them"):
        open_dataset("pandaset", root)
    with caplog.at_level(logging.INFO, logger="bev_data.datasets"):
        assert len(open_dataset("pandaset", root, cameras="available")) == 1
    assert "1 of 2" in caplog.text
    assert open_dataset("pandaset", root, cameras="none")[1].cameras == ()
    moved = images.rename(root.parent / "elsewhere")
    with pytest.raises(InputError, match="2 of 2"):
        open_dataset("pandaset", root)
    assert len(open_dataset("pandaset", root, cameras="available", images=moved)) == 1


def changed(*keys, value):
    def change(values):
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = value

    return change


POSE = ("frames", "00", "cams", "back_camera")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("intrinsics", value={}), "no intrinsics / front_camera / fx"),
        (changed("intrinsics", "back_camera", value={"fx": 1}), "no intrinsics / back_camera / fy"),
        (changed("intrinsics", "back_camera", "fx", value=None), "NaN or Inf"),
        (changed("intrinsics", "back_camera", "fx", value=0), "singular"),
        (
            changed("intrinsics", "back_camera", "fx", value=0.5),
            r"00\.jpg: CAM_BACK: focal lengths",
        ),
        (changed("intrinsics", "back_camera", "cx", value=2970), "outside the image"),
        (changed(*POSE, value={}), "no frames / 00 / cams / back_camera / cam2ego"),
        (changed(*POSE, "cam2ego", value=[[1, 2]]), r"back_camera: pose must be numbers \[4, 4\]"),
        (changed(*POSE, "cam2ego", value=np.diag([2, 2, 2, 1]).tolist()), "not rigid"),
    ],
)
def test_bad_calibration(root, change, message):
    values = json.loads((root / "calib.json").read_text())
    change(values)
    (root / "calib.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=message):
        open_dataset("pandaset", root)[0]


def test_missing_calibration_and_poses(root):
    values = json.loads((root / "calib.json").read_text())
    del values["frames"]["02"]
    (root / "calib.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match="frame 02 lacks a pose"):
        open_dataset("pandaset", root)
    (root / "calib.json").unlink()
    with pytest.raises(InputError, match=r"calib\.json: no such file"):
        open_dataset("pandaset", root)


def test_images_of_another_size(root):
    image = root.parent / "street/camera/back_camera/00.jpg"
    Image.new("RGB", (960, 540)).save(image)
    with pytest.raises(InputError, match=r"00\.jpg: the image is 960x540, but .* 1920x1080"):
        open_dataset("pandaset", root)[0]


def test_the_real_sequence(real_data):
    frames = open_dataset("pandaset", real_data / "pandaset_002_compact", cameras="available")
    assert [frame[-2:] for frame in frames.keys] == ["00", "08", "16", "24", "32"]
    frame = frames[1]
    with np.load(real_data / "pandaset_002_compact/frame_08.npz") as file:
        road = (file["semseg"] == 7) & (np.abs(frame.points[:, :2]).max(axis=1) < 12)
    road_height = np.median(frame.points[road, 2])
    assert road_height == pytest.approx(-1.84, abs=0.15)  # as under nuScenes' scanner
    assert frame.points[:, 4].min() >= 0
    assert frame.points[:, 4].max() < 0.11
    cars = np.array([name == "car" for name in frame.labels.names])
    near = np.linalg.norm(frame.labels.boxes[:, :2], axis=1) < 30
    assert (frame.labels.num_points[cars & near] > 0).mean() > 0.95
