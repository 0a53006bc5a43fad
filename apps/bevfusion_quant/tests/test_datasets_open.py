from __future__ import annotations

import numpy as np
import pytest

from bevfusion_quant._errors import InputError
from bevfusion_quant.datasets import FrameList, open_dataset
from bevfusion_quant.points import Frame
from bevfusion_quant.scenes import street_frame

SMALL = {"beams": 8, "sweeps": 1, "azimuth_steps": 90}


def test_streets_are_made_when_asked_for():
    frames = open_dataset("street", count=10**9, first_seed=5, **SMALL)
    assert len(frames) == 10**9
    np.testing.assert_array_equal(frames[2].points, street_frame(7, **SMALL).points)
    assert frames[-1].name == f"street_{10**9 + 4}"
    part = frames[10:30:10]
    assert isinstance(part, FrameList)
    assert [frame.name for frame in part] == ["street_15", "street_25"]
    with pytest.raises(IndexError):
        part[2]


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
            "kind 'waymo': expected one of street, pandaset, kitti, files, nuscenes",
        ),
        ("street", "x", {}, "leave the path out"),
        ("street", None, {"count": 0}, "at least one street"),
        ("street", None, {"first_seed": -1}, "no negative seed"),
        ("street", None, {"lasers": 3}, "lasers: a street has count, first_seed, .*beams"),
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


def test_a_street_that_cannot_be_made_is_bad_input():
    with pytest.raises(InputError, match="street 0: "):
        open_dataset("street", beams=0)[0]
