from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from bev_data import InputError
from bev_data.cameras import Camera
from bev_data.datasets import open_dataset, write_frame_folder
from bev_data.points import Frame, Labels, VoxelData, read_points

AHEAD = np.array([[1.0, 0, 0, 0], [0, 0, -1, -0.3], [0, 1, 0, -0.7], [0, 0, 0, 1]])
INTRINSICS = np.array([[50.0, 0, 31.7], [0, 51, 18], [0, 0, 1]])


@pytest.fixture
def frame() -> Frame:
    rng = np.random.default_rng(0)
    labels = Labels(
        rng.uniform(1, 5, (2, 7)).astype(np.float32),
        ("car", "bus"),
        np.array([[1.5, -2], [np.nan, np.nan]], np.float32),
        np.array([np.nan, 0.3], np.float32),
        np.array([4, 0], np.int32),
    )
    cameras = tuple(
        Camera(name, rng.integers(0, 256, (36, 64, 3), np.uint8), INTRINSICS, AHEAD)
        for name in ("CAM_FRONT", "CAM_BACK")
    )
    return Frame("street", rng.uniform(0, 9, (20, 5)).astype(np.float32), None, labels, cameras)


@pytest.fixture
def folder(frame, tmp_path):
    return write_frame_folder(tmp_path / "one", frame)


def edit(folder, change) -> None:
    values = json.loads((folder / "calib.json").read_text())
    change(values)
    (folder / "calib.json").write_text(json.dumps(values))


def assert_same(got: Frame, frame: Frame) -> None:
    np.testing.assert_array_equal(got.points, frame.points)
    for mine, other in zip(got.labels, frame.labels, strict=True):
        np.testing.assert_array_equal(mine, other)
    for mine, other in zip(got.cameras, frame.cameras, strict=True):
        assert mine.name == other.name
        np.testing.assert_array_equal(mine.image, other.image)
        np.testing.assert_array_equal(mine.intrinsics, other.intrinsics)
        np.testing.assert_array_equal(mine.lidar_to_camera, other.lidar_to_camera)


def test_a_frame_survives_its_folder(frame, folder):
    (got,) = open_dataset("files", folder)
    assert got.name == "one"
    assert_same(got, frame)
    assert sorted(entry.name for entry in folder.parent.iterdir()) == ["one"]
    text = (folder / "calib.json").read_text()
    assert "NaN" not in text


def test_what_cannot_be_written(frame, folder, tmp_path):
    with pytest.raises(InputError, match="exists already"):
        write_frame_folder(folder, frame)
    voxels = VoxelData(np.zeros((1, 5), np.float32), np.zeros((1, 4), np.int32))
    with pytest.raises(InputError, match="holds voxels"):
        write_frame_folder(tmp_path / "two", Frame("v", voxels=voxels))
    assert not (tmp_path / "two").exists()


def test_folders_of_folders_and_mixtures(frame, folder, tmp_path):
    write_frame_folder(tmp_path / "two", frame)
    bare = tmp_path / "bare.npz"
    np.savez(bare, points=frame.points)
    assert [f.name for f in open_dataset("files", tmp_path)] == ["one", "two"]
    mixed = open_dataset("files", [bare, tmp_path / "two", folder])
    assert [(f.name, len(f.cameras)) for f in mixed] == [("bare", 0), ("two", 2), ("one", 2)]
    np.savez(tmp_path / "key.npz", cloud=frame.points)
    assert len(open_dataset("files", tmp_path / "key.npz", key="cloud")[0]) == 20


def test_the_only_points_file_need_not_be_named(frame, folder):
    edit(folder, lambda values: values.pop("points"))
    assert_same(open_dataset("files", folder)[0], frame)
    np.savez(folder / "more.npz", points=frame.points)
    with pytest.raises(InputError, match=r'2 points files \(more.npz, points.npz\).*"points"'):
        open_dataset("files", folder)[0]


def test_labels_are_optional(folder):
    edit(folder, lambda values: values.pop("labels"))
    assert open_dataset("files", folder)[0].labels is None


def set_camera(**values):
    return lambda content: content["cameras"][1].update(values)


def drop_camera(key):
    return lambda content: content["cameras"][1].pop(key)


def set_labels(**values):
    return lambda content: content["labels"].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_camera(image="gone.png"), "gone.png: no such image"),
        (set_camera(width=1600), "is 64x36, but its calibration is for 1600x36; scale fx"),
        (drop_camera("intrinsics"), r"cameras\[1\]: object missing required field `intrinsics`"),
        (set_camera(intrinsics=None), r"CAM_BACK: intrinsics must be numbers \[3, 3\]"),
        (set_camera(intrinsics=[[1, 2], [3]]), r"intrinsics must be numbers \[3, 3\]"),
        (
            set_camera(intrinsics=np.zeros((3, 3)).tolist()),
            "CAM_BACK.png: CAM_BACK: the intrinsics are singular",
        ),
        (set_camera(intrinsics=[[0.8, 0, 0.5], [0, 1.4, 0.5], [0, 0, 1]]), "normalised"),
        (set_camera(lidar_to_camera=(AHEAD * 2).tolist()), "lidar_to_camera"),
        (set_camera(name="CAM_FRONT"), "each name must be its own"),
        (set_camera(distortion=[0, 0]), "unknown field `distortion`"),
        (lambda content: content.update(camera=[]), "unknown field `camera`"),
        (lambda content: content.update(cameras={}), "cameras: expected `array`, got `object`"),
        (lambda content: content.update(points="gone.npz"), "gone.npz: no such file"),
        (set_labels(names=["car"]), "2 boxes but 1 class names"),
        (set_labels(boxes=[[0] * 7, [None] * 7]), "NaN or Inf or a size"),
        (set_labels(boxes=[[0] * 6]), r"boxes must be numbers \[N, 7\], not \[1, 6\]"),
        (set_labels(visibility=[1]), r"visibility must be numbers \[1, 2\]"),
        (
            lambda content: content["labels"].pop("names"),
            "missing required field `names`",
        ),
        (lambda content: content.update(labels=[]), "labels: expected `object"),
    ],
)
def test_bad_folders(folder, change, message):
    edit(folder, change)
    with pytest.raises(InputError, match=message):
        open_dataset("files", folder)[0]


def test_unreadable_images_and_calibration(folder):
    image = folder / "CAM_FRONT.png"
    whole = image.read_bytes()
    for content in (b"", b"no image", whole[: len(whole) // 2]):
        image.write_bytes(content)
        with pytest.raises(InputError, match=r"CAM_FRONT\.png: not a readable image"):
            open_dataset("files", folder)[0]
    (folder / "calib.json").write_text("{")
    with pytest.raises(InputError, match=r"calib\.json is not a JSON document"):
        open_dataset("files", folder)
    (folder / "calib.json").write_text("[]")
    with pytest.raises(InputError, match="expected `object`, got `array`"):
        open_dataset("files", folder)


def test_other_image_kinds_become_rgb(folder):
    with Image.open(folder / "CAM_FRONT.png") as picture:
        grey = picture.convert("L")
    grey.save(folder / "CAM_FRONT.png")
    image = open_dataset("files", folder)[0].cameras[0].image
    assert image.shape == (36, 64, 3)
    np.testing.assert_array_equal(image[..., 0], np.asarray(grey))
    np.testing.assert_array_equal(image[..., 2], np.asarray(grey))


def test_a_calibration_of_another_kind_does_not_hide_points(frame, tmp_path, caplog):
    np.savez(tmp_path / "frame_00.npz", points=frame.points)
    (tmp_path / "calib.json").write_text('{"intrinsics": {}}')
    (got,) = open_dataset("files", tmp_path)
    np.testing.assert_array_equal(got.points, read_points(tmp_path / "frame_00.npz").points)
    assert 'calib.json lists no "cameras"; points are read without images' in caplog.text
