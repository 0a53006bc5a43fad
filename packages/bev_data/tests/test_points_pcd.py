"""`.pcd` in its three forms, whole and damaged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from point_files import drive, pack_lzf, write_pcd

from bev_data.points import PointsError, read_points
from bev_data.points._pcd import unpack_lzf

FORMS = ("ascii", "binary", "binary_compressed")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_same_points(tmp_path, form):
    columns = drive(300)
    extra = [("_", np.zeros((300, 3), np.uint8)), ("normal", np.ones((300, 3), np.float32))]
    frame = read_points(write_pcd(tmp_path / "a.pcd", columns, form, extra=extra))
    assert frame.name == "a"
    for i, name in enumerate(("x", "y", "z", "intensity")):
        np.testing.assert_array_equal(frame.points[:, i], columns[name].astype(np.float32))
    newest = columns["offset_ns"].max()
    np.testing.assert_allclose(frame.points[:, 4], (newest - columns["offset_ns"]) * 1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_types_of_fields(tmp_path, form):
    columns = {
        "X": np.array([1.5, -2.0]), "y": np.array([3, -4], np.int16),
        "z": np.array([0.5, 0.25], np.float32), "reflectivity": np.array([7, 200], np.uint16),
        "timestamp_ns": np.array([1_600_000_000_000_000_000, 1_600_000_000_050_000_000], np.uint64),
    }  # fmt: skip
    points = read_points(write_pcd(tmp_path / "a.pcd", columns, form)).points
    assert points[:, :4].tolist() == [[1.5, 3, 0.5, 7], [-2, -4, 0.25, 200]]
    np.testing.assert_allclose(points[:, 4], [0.05, 0], atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_organised_clouds_have_nan_where_nothing_came_back(tmp_path, form, caplog):
    columns = drive(60)
    for name in "xyz":
        columns[name][[4, 17]] = np.nan
    path = write_pcd(tmp_path / "a.pcd", columns, form, width=20)
    with pytest.raises(PointsError, match="2 of 60 rows hold NaN or Inf, the first is row 4"):
        read_points(path)
    assert len(read_points(path, nonfinite="drop")) == 58


def test_viewpoint_is_reported(tmp_path, caplog):
    write_pcd(tmp_path / "a.pcd", drive(), viewpoint="1 2 0 1 0 0 0")
    read_points(tmp_path / "a.pcd")
    assert "VIEWPOINT 1 2 0 1 0 0 0 is not applied" in caplog.text
    caplog.clear()
    read_points(write_pcd(tmp_path / "b.pcd", drive()))
    assert not caplog.text


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_cloud(tmp_path, form):
    path = write_pcd(tmp_path / "a.pcd", drive(0), form, width=1)
    with pytest.raises(PointsError, match="holds no points"):
        read_points(path)


@pytest.mark.parametrize("form", FORMS)
def test_every_cut_is_refused(tmp_path, form):
    path = write_pcd(tmp_path / "a.pcd", drive(20), form)
    raw = path.read_bytes()
    whole = len(raw) - (12 if form == "ascii" else 2)  # the last number may be a shorter one
    for length in range(0, whole, 7):
        path.write_bytes(raw[:length])
        with pytest.raises(PointsError, match=r"a\.pcd: "):
            read_points(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"DATA binary", b"DATA zipped", "DATA zipped; expected ascii, binary or"),
        (b"TYPE F F F U", b"TYPE F F Q U", "field z has TYPE Q"),
        (b"SIZE 4 4 4 1", b"SIZE 4 4 9 1", "damaged header"),
        (b"SIZE 4 4 4 1", b"SIZE 4 4 1", "differ in length"),
        (b"HEIGHT 1", b"HEIGHT 2", "WIDTH 20 × HEIGHT 2 contradicts POINTS 20"),
        (b"WIDTH 20", b"WIDTH -5", "contradicts"),
        (b"WIDTH 20", b"WIDE 20", "lacks WIDTH"),
        (b"FIELDS x y z intensity", b"FIELDS x y y intensity", "damaged header"),
        (b"POINTS 20", b"POINTS 2000000000", "contradicts"),
    ],
)
def test_damaged_headers(tmp_path, old, new, message):
    path = write_pcd(tmp_path / "a.pcd", drive(20))
    raw = path.read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, new))
    with pytest.raises(PointsError, match=rf"a\.pcd: .*{message}"):
        read_points(path)


@pytest.mark.parametrize("form", FORMS)
def test_changed_bytes_are_read_or_refused(tmp_path, form):
    path = write_pcd(tmp_path / "a.pcd", drive(30), form)
    raw, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(raw)
        damaged[rng.integers(len(raw))] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            assert len(read_points(path)) > 0
        except PointsError as error:
            assert "a.pcd" in str(error)  # noqa: PT017 (either outcome is right)


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 300))
def test_lzf_streams_expand_to_what_was_packed(parts, times):
    data = b"".join(part * times for part in parts)[:20_000]
    assert unpack_lzf(pack_lzf(data), len(data)) == data


@pytest.mark.parametrize(
    ("stream", "size", "message"),
    [
        (b"\x00", 1, "expected 1"),
        (b"\x20\x05", 3, "before its begin"),
        (b"\x00a\x20", 4, "ends early"),
        (b"\x01ab", 9, "holds 2 bytes"),
        (b"\x00a\xe0\xff\x00", 5, "or more"),
    ],
)
def test_damaged_lzf(stream, size, message):
    with pytest.raises(ValueError, match=message):
        unpack_lzf(stream, size)
