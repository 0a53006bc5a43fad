from __future__ import annotations

import logging

import numpy as np
import pytest
from PIL import Image

from bev_data import InputError
from bev_data.cameras import project
from bev_data.datasets import open_dataset

# The velodyne's x forward, y left, z up become the camera's z, −x, −y.
CALIB = """P0: 1 0 0 0 0 1 0 0 0 0 1 0
P2: 100 0 62 50 0 100 19 -2 0 0 1 0
R0_rect: 1 0 0 0 1 0 0 0 1
Tr_velo_to_cam: 0 -1 0 0 0 0 -1 -0.1 1 0 0 -0.3
"""
CAR = "Car 0.00 1 -1.5 10 20 30 40 1.5 1.6 4.0 2.0 1.7 12.0 0.2"
LABELS = f"""{CAR}
Van 0.1 3 0 1 2 3 4 2 2 5 -3 1.6 20 -1.5707963
Tram 0 0 0 1 2 3 4 3 2 5 -9 1.6 20 0

DontCare -1 -1 -10 1 2 3 4 -1 -1 -1 -1000 -1000 -1000 -10
"""


@pytest.fixture
def root(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("velodyne", "image_2", "calib", "label_2"):
        (tmp_path / "training" / name).mkdir(parents=True)
    root = tmp_path / "training"
    for frame in ("000000", "000001"):
        rows = rng.uniform(-20, 20, (50, 4)).astype("<f4")
        rows[:, 3] = 0.5
        rows[0, :3] = [12.3, -2.0, -1.0]  # inside the car
        rows.tofile(root / "velodyne" / f"{frame}.bin")
        Image.new("RGB", (124, 37), (10, 200, 30)).save(root / "image_2" / f"{frame}.png")
        (root / "calib" / f"{frame}.txt").write_text(CALIB)
        (root / "label_2" / f"{frame}.txt").write_text(LABELS)
    return root


@pytest.mark.parametrize("above", [0, 1])
def test_everything_lands_in_our_frame(root, above):
    frames = open_dataset("kitti", [root, root.parent][above])
    frame = frames[1]
    raw = np.fromfile(root / "velodyne/000001.bin", "<f4").reshape(-1, 4)
    np.testing.assert_array_equal(frame.points[:, 0], -raw[:, 1])  # right is not left
    np.testing.assert_array_equal(frame.points[:, 1], raw[:, 0])
    np.testing.assert_array_equal(frame.points[:, 2], raw[:, 2])
    assert set(frame.points[:, 3]) == {127.5}
    labels = frame.labels
    assert labels.names == ("car", "car", "Tram")
    # 2 m right, 12 m + 0.3 m ahead; bottom 1.7 + 0.1 m down, 1.5 m tall. The length of rotation 0
    # points right; a turn about the downward axis is clockwise seen from above.
    expected = [2.0, 12.3, -1.8 + 0.75, 4.0, 1.6, 1.5, -0.2]
    np.testing.assert_allclose(labels.boxes[0], expected, atol=1e-6)
    np.testing.assert_allclose(labels.boxes[1, 6], np.pi / 2, atol=1e-6)
    np.testing.assert_allclose(labels.visibility, np.float32([0.6, np.nan, 1]))
    assert labels.num_points[0] >= 1
    (camera,) = frame.cameras
    assert (camera.name, camera.width, camera.height) == ("CAM_FRONT", 124, 37)
    assert camera.image[0, 0].tolist() == [10, 200, 30]
    # P2 · (x, y, z, 1) by hand for the point in the car
    pixels, depth = project(camera, frame.points[:1])
    np.testing.assert_allclose(depth, [12.0], rtol=1e-6)
    np.testing.assert_allclose(
        pixels[0], [(200 + 62 * 12 + 50) / 12, (90 + 19 * 12 - 2) / 12], rtol=1e-6
    )


def test_frames_without_images(root, caplog):
    (root / "image_2" / "000000.png").unlink()
    with pytest.raises(
        InputError, match=r"1 of 2 LiDAR frames .* 000000 lacks image_2/000000\.png"
    ):
        open_dataset("kitti", root)
    with caplog.at_level(logging.INFO, logger="bev_data.datasets"):
        (frame,) = open_dataset("kitti", root, cameras="available")
    assert frame.name == "000001"
    assert "left out" in caplog.text
    frames = open_dataset("kitti", root, cameras="none")
    assert [len(frame.cameras) for frame in frames] == [0, 0]
    assert len(frames[0].labels.boxes) == 3
    (root / "image_2" / "000001.png").unlink()
    with pytest.raises(InputError, match="no frame is left"):
        open_dataset("kitti", root, cameras="available")


def test_jpegs_serve_as_well(root):
    Image.new("RGB", (124, 37)).save(root / "image_2" / "000000.jpg")
    (root / "image_2" / "000000.png").unlink()
    assert open_dataset("kitti", root)[0].cameras[0].width == 124


def test_without_labels(root):
    for file in (root / "label_2").iterdir():
        file.unlink()
    with pytest.raises(InputError, match=r"label_2/000000\.txt: no such file"):
        open_dataset("kitti", root)[0]
    (root / "label_2").rmdir()
    assert open_dataset("kitti", root)[0].labels is None
    assert open_dataset("kitti", root, cameras="none")[0].labels is None


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("calib", "P2:", "P7:", r"000000\.txt: no P2; the calibration is incomplete"),
        ("calib", "P2: 100", "P2: 1e2 7", "P2 is no matrix"),
        ("calib", "P2: 100", "P2: nan", "P2 holds NaN"),
        (
            "calib",
            "P2: 100 0 62 50 0 100 19",
            "P2: 0 0 0 0 0 0 0",
            "P2 .* of its .* singular",
        ),
        ("calib", "100 0 62 50 0 100 19", "0.8 0 0.5 0 0 2.7 0.5 0", "is no matrix"),
        ("calib", "100 0 62 50 0 100 19", "0.8 0 0.5 0 0 2.7 0.5", "png: CAM_FRONT: .*normalised"),
        ("calib", "R0_rect: 1", "R0_rect: 2", "not rigid"),
        ("label_2", "Car 0.00", "Car x", "line 1: could not convert"),
        ("label_2", CAR, "Car 0 0", "line 1 has 3 fields"),
        ("label_2", "1.5 1.6 4.0", "1.5 -1.6 4.0", "a size that is not positive"),
        ("label_2", "2.0 1.7 12.0", "nan 1.7 12.0", "hold NaN"),
    ],
)
def test_damaged_text(root, file, old, new, message):
    path = root / file / "000000.txt"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(InputError, match=message):
        open_dataset("kitti", root)[0]


def test_labels_that_are_no_text(root):
    path = root / "label_2/000000.txt"
    path.write_bytes(path.read_bytes().replace(b"Car", b"C\xffr"))
    with pytest.raises(InputError, match=r"label_2/000000\.txt: damaged, no text of labels"):
        open_dataset("kitti", root)[0]


def test_points_inside_real_boxes_land_inside_the_annotated_rectangles(real_data):
    """label_2's rectangles were drawn by people in the image: they know nothing of our geometry."""
    root = real_data / "avod_kitti13/object/training"
    checked = 0
    for frame in open_dataset("kitti", root):
        text = (root / "label_2" / f"{frame.name}.txt").read_text()
        lines = [line.split() for line in text.splitlines()]
        lines = [fields for fields in lines if fields[0] != "DontCare"]
        for fields, box, count in zip(
            lines, frame.labels.boxes, frame.labels.num_points, strict=True
        ):
            if count < 20:
                continue
            c, s = np.cos(box[6]), np.sin(box[6])
            own = (frame.points[:, :3] - box[:3]) @ np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])
            inside = (np.abs(own) <= box[3:6] / 2).all(axis=1)
            assert inside.sum() == count
            pixels, _ = project(frame.cameras[0], frame.points[inside])
            left, top, right, bottom = (float(value) for value in fields[4:8])
            inside = (pixels > [left - 3, top - 3]) & (pixels < [right + 3, bottom + 3])
            assert inside.all(axis=1).mean() > 0.97, (frame.name, fields)
            # and they fill it: another scale or another side would not
            spread = np.ptp(pixels[:, 0]) / (right - left)
            assert spread > 0.7, (frame.name, fields)
            checked += 1
    assert checked >= 8
