"""Streets as a data set."""

from __future__ import annotations

import runpy
import sys

import numpy as np
import pytest
from silhouettes import agreement, assert_sharpest_unmoved

from bev_data import InputError
from bev_data.datasets import FrameList, open_dataset
from bev_scenes import stored_street, street_frame

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


@pytest.mark.parametrize(
    ("kind", "path", "options", "message"),
    [
        ("street", "x", {}, "leave the path out"),
        ("street", None, {"count": 0}, "at least one street"),
        ("street", None, {"first_seed": -1}, "no negative seed"),
        ("street", None, {"conditions": "snow"}, "conditions=snow: unknown; .*rain, fog"),
        ("street", None, {"lasers": 3}, "lasers: a street has count, first_seed, .*beams"),
    ],
)
def test_bad_requests(kind, path, options, message):
    with pytest.raises(InputError, match=message):
        open_dataset(kind, path, **options)


@pytest.mark.bits
def test_the_stored_street_is_what_is_rendered():
    stored, rendered = stored_street(), street_frame(0, size="tiny", cameras="tiny")
    assert stored.name == rendered.name
    np.testing.assert_array_equal(stored.points, rendered.points)
    for one, other in zip(stored.labels, rendered.labels, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(stored.cameras, rendered.cameras, strict=True):
        assert one.name == other.name
        np.testing.assert_array_equal(one.image, other.image)
        np.testing.assert_array_equal(one.intrinsics, other.intrinsics)
        np.testing.assert_array_equal(one.lidar_to_camera, other.lidar_to_camera)


def test_a_street_that_cannot_be_made_is_bad_input():
    with pytest.raises(InputError, match="street 0: "):
        open_dataset("street", beams=0)[0]


def test_street_silhouettes():
    frames = open_dataset("street", first_seed=1, cameras="tiny", sweeps=1)
    assert_sharpest_unmoved(agreement(frames, band=3, gap=5, ratio=1.2), 1.08)


def test_pictures_without_matplotlib_name_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("sys.argv", ["bev_scenes", str(tmp_path)])
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        runpy.run_module("bev_scenes", run_name="__main__")
