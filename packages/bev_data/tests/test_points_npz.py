from __future__ import annotations

import numpy as np
import pytest

from bev_data.points import PointsError, read_points, save_tensor

ROWS = np.arange(20, dtype=np.float32).reshape(4, 5)
ROWS[:, 4] /= 40  # seconds


def test_points_under_the_default_and_another_key(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, points=ROWS, cloud=ROWS[:2, :4].astype(np.float64))
    np.testing.assert_array_equal(read_points(path).points, ROWS)
    other = read_points(path, key="cloud").points
    np.testing.assert_array_equal(other[:, :4], ROWS[:2, :4])
    assert not other[:, 4].any()
    assert other.dtype == np.float32


def test_labels_come_along(tmp_path):
    path = tmp_path / "a.npz"
    boxes = np.ones((2, 7), np.float32)
    np.savez(path, points=ROWS, boxes=boxes, names=np.array(["Car", "Pedestrian"]))
    labels = read_points(path).labels
    assert labels.names == ("Car", "Pedestrian")
    np.testing.assert_array_equal(labels.boxes, boxes)
    np.savez(path, points=ROWS, boxes=boxes, names=np.array(["Car"]))
    with pytest.raises(PointsError, match=r"boxes \[2, 7\] and names \[1\]"):
        read_points(path)


def test_intensity_scale(tmp_path):
    np.savez(tmp_path / "a.npz", points=ROWS)
    scaled = read_points(tmp_path / "a.npz", intensity_scale=2.0).points
    np.testing.assert_array_equal(scaled[:, 3], ROWS[:, 3] * 2)


@pytest.mark.parametrize("kind", ["npz", "tensor", "bin"])
@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        (
            4,
            [1.5e9, 1.5e9 + 0.1],
            "time lag reaches 1.5e.09 s; expected at most 10 s, or ring numbers",
        ),
        (4, [-20.5, 0.0], "time lag reaches 20.5"),
        (3, [0.0, 65535.0], r"spans 0\.\.6.*set intensity_scale="),
        (3, [-1.0, 100.0], r"spans -1\.\.100, not 0\.\.255"),
    ],
)
def test_every_format_has_one_rule(tmp_path, kind, column, values, message):
    rows = np.tile(np.float32([5.5, -1.5, 0.5, 30.0, 0.05]), (2, 1))
    rows[:, column] = values
    path = tmp_path / f"a.{kind}"
    save = {"npz": lambda: np.savez(path, points=rows), "bin": lambda: rows.tofile(path)}
    save.get(kind, lambda: save_tensor(path, rows))()
    with pytest.raises(PointsError, match=rf"a\.{kind}: .*{message}"):
        read_points(path, columns=5, dtype="float32")


def test_rings_and_intensities_of_0_to_1_are_converted_as_in_a_bin(tmp_path):
    rows = np.tile(np.float32([5.5, -1.5, 0.5, 30.0, 31.0]), (2, 1))
    np.savez(tmp_path / "ring.npz", points=rows)
    assert not read_points(tmp_path / "ring.npz").points[:, 4].any()
    for largest, made in ((1.0, 255.0), (200.0, 200.0)):
        rows[:, 3] = [0.0, largest]
        np.savez(tmp_path / "a.npz", points=rows[:, :4])
        rows[:, :4].tofile(tmp_path / "a.bin")
        for read in (
            read_points(tmp_path / "a.npz"),
            read_points(tmp_path / "a.bin", columns=4, dtype="float32"),
        ):
            assert read.points[:, 3].tolist() == [0.0, made]


def test_missing_key_names_what_there_is(tmp_path):
    np.savez(tmp_path / "a.npz", cloud=ROWS)
    with pytest.raises(PointsError, match=r"no array 'points'; the archive holds \['cloud'\]"):
        read_points(tmp_path / "a.npz")


def test_pickled_objects_are_never_loaded(tmp_path):
    np.savez(tmp_path / "a.npz", points=np.array([{"x": 1}], dtype=object))
    with pytest.raises(PointsError, match="'points' holds pickled Python objects"):
        read_points(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 3), np.float32), r"shape \[4, 3\]; expected \[N, 4\]"),
        (np.zeros((4, 6), np.float32), r"shape \[4, 6\]"),
        (np.zeros(20, np.float32), r"shape \[20\]"),
        (np.zeros((4, 5), np.int32), "is int32; expected floating point"),
        (np.zeros((0, 5), np.float32), "holds no points"),
        (np.full((4, 5), 1e300), "NaN or Inf"),
    ],
)
def test_arrays_that_are_no_points(tmp_path, array, message):
    np.savez(tmp_path / "a.npz", points=array)
    with pytest.raises(PointsError, match=message):
        read_points(tmp_path / "a.npz")


def test_truncated_and_foreign_archives(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, points=ROWS)
    raw = path.read_bytes()
    for content in (raw[: len(raw) // 2], b"", b"no archive at all"):
        path.write_bytes(content)
        with pytest.raises(PointsError, match=r"not an \.npz archive"):
            read_points(path)
    damaged = bytearray(raw)
    damaged[150] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(PointsError, match=r"a\.npz"):
        read_points(path)
    np.save(tmp_path / "b.npy", ROWS)
    (tmp_path / "b.npy").rename(tmp_path / "b.npz")
    with pytest.raises(PointsError, match=r"bare \.npy array"):
        read_points(tmp_path / "b.npz")
