from __future__ import annotations

import numpy as np
import pytest

from bev_data import InputError
from bev_data.cameras import CAMERA_NAMES
from bev_data.datasets import (
    FrameList,
    _open,
    dataset_cameras,
    open_dataset,
    register_dataset,
)
from bev_data.points import Frame


def test_a_frame_is_read_at_every_access():
    asked = []

    def read(key: int) -> Frame:
        asked.append(key)
        return Frame(str(key), np.zeros((1, 5), np.float32))

    frames = FrameList("x", [3, 4, 5], read)
    part = frames[1:]
    assert not asked
    assert [frame.name for frame in part] == ["4", "5"]
    frames[0], frames[0]
    assert asked == [4, 5, 3, 3]
    assert repr(part) == "FrameList(x, 2 frames)"


@pytest.mark.parametrize(
    ("kind", "path", "options", "message"),
    [
        (
            "waymo",
            "x",
            {},
            "kind 'waymo': expected one of files, kitti, mmdet3d, nuscenes, pandaset",
        ),
        ("kitti", None, {}, "needs a path"),
        ("kitti", "/nowhere/at/all", {}, "/nowhere/at/all: no such folder"),
        ("kitti", ["a", "b"], {}, "one folder, not several"),
        ("kitti", ".", {"camera": "all"}, "camera: kitti has the options cameras"),
        ("kitti", ".", {"cameras": "some"}, "'all' .* 'available' .* 'none'"),
        ("kitti", ".", {}, "no folder velodyne"),
        ("pandaset", ".", {}, r"holds no frame_NN\.npz"),
        ("files", [], {}, "no frames given"),
        ("files", "/nowhere.bin", {}, "no such file"),
        ("files", ".", {"colums": 4}, "colums: files have the options columns"),
        ("nuscenes", ".", {"sweeps": 0}, "sweeps=0"),
        ("nuscenes", ".", {"cameras": "available"}, "expected 'all' or 'none'"),
    ],
)
def test_bad_requests(kind, path, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        open_dataset(kind, path, **options)


def test_a_kind_of_ones_own_is_opened_like_the_others(monkeypatch):
    monkeypatch.setattr(_open, "_added", {})  # others are not to know it
    asked = []

    def opener(path, *, count=1):
        asked.append(path)
        points = np.ones((1, 5), np.float32)
        return FrameList("own", range(count), lambda key: Frame(str(key), points))

    register_dataset("own", opener)
    assert [frame.name for frame in open_dataset("own", "anything", count=2)] == ["0", "1"]
    assert len(open_dataset("own")) == 1
    assert asked == ["anything", None]
    with pytest.raises(InputError, match="counts: own has the options count"):
        open_dataset("own", counts=2)
    with pytest.raises(InputError, match=r"expected one of .*, own; a package adds one"):
        open_dataset("other")


def test_a_kind_of_ones_own_says_which_cameras_it_has(monkeypatch):
    monkeypatch.setattr(_open, "_added", {})

    def opener(path):
        return FrameList("own", [], list)

    register_dataset("own", opener)
    assert dataset_cameras("own") == CAMERA_NAMES
    opener.camera_names = ("CAM_BACK", "CAM_FRONT")
    assert dataset_cameras("own") == ("CAM_BACK", "CAM_FRONT")
    with pytest.raises(InputError, match="expected one of"):
        dataset_cameras("other")


def test_a_kind_of_the_package_cannot_be_replaced():
    with pytest.raises(InputError, match="'kitti' is a data set of this package"):
        register_dataset("kitti", lambda path: FrameList("x", [], list))
