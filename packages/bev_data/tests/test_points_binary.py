from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bev_data.points import PointsError, read_points


def cloud(rows: int, seed: int = 0) -> np.ndarray:
    """x, y, z, intensity 0..255, ring, as a scanner gives them."""
    rng = np.random.default_rng(seed)
    xyz = rng.normal(0.0, [25.0, 25.0, 2.0], (rows, 3))
    return np.column_stack([xyz, rng.integers(0, 256, rows), rng.integers(0, 32, rows)]).astype(
        np.float32
    )


def kitti(rows: int, seed: int = 0) -> np.ndarray:
    points = cloud(rows, seed)[:, :4]
    points[:, 3] /= 256
    return points


def written(tmp_path, array, name="frame.bin"):
    path = tmp_path / name
    path.write_bytes(np.ascontiguousarray(array).tobytes())
    return path


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(30, 400), seed=st.integers(0, 2**32 - 1), kind=st.integers(0, 2))
def test_layout_is_found_whatever_the_size(tmp_path, rows, seed, kind):
    if kind == 0:
        truth = cloud(rows, seed)
        got = read_points(written(tmp_path, truth)).points
    elif kind == 1:
        truth = kitti(rows, seed)
        got = read_points(written(tmp_path, truth)).points
        truth = np.column_stack([truth[:, :3], truth[:, 3] * np.float32(255), truth[:, 0]])
    else:
        half = cloud(rows, seed).astype(np.float16)
        truth = half.astype(np.float32)
        got = read_points(written(tmp_path, half)).points
    assert got.dtype == np.float32
    assert got.shape == (rows, 5)
    np.testing.assert_array_equal(got[:, :4], truth[:, :4])
    assert not got[:, 4].any()


@pytest.mark.parametrize("rows", [20, 100, 1000])
def test_kitti_whose_size_divides_into_nuscenes_rows(tmp_path, rows):
    path = written(tmp_path, kitti(rows))
    assert path.stat().st_size % 20 == 0
    assert len(read_points(path)) == rows


def test_fifth_column_that_is_no_ring_is_a_time_lag(tmp_path):
    points = cloud(100)
    points[:, 4] = np.repeat(np.float32([0.0, 0.05, 0.1, 0.45]), 25)
    np.testing.assert_array_equal(read_points(written(tmp_path, points)).points, points)


def test_said_explicitly_nothing_is_guessed(tmp_path):
    zeros = np.zeros((20, 4), np.float32)
    path = written(tmp_path, zeros)
    with pytest.raises(PointsError, match=r"can be read as .* and as .*columns=4 or columns=5"):
        read_points(path)
    assert len(read_points(path, columns=4, dtype="float32")) == 20
    assert len(read_points(path, columns=4, dtype="float16")) == 40
    assert len(read_points(path, columns=5, dtype="float32")) == 16


def test_nuscenes_extension_settles_what_the_values_leave_open(tmp_path):
    ones = np.tile(np.float32([1.0, 1.0, 1.0, 1.0, 1.0]), (16, 1))
    assert read_points(written(tmp_path, ones, "a.pcd.bin")).points.shape == (16, 5)
    with pytest.raises(PointsError, match="can be read as"):
        read_points(written(tmp_path, ones, "a.bin"))


def test_intensity_scale_replaces_the_format_s(tmp_path):
    path = written(tmp_path, kitti(50))
    np.testing.assert_array_equal(
        read_points(path, intensity_scale=1.0).points[:, 3], kitti(50)[:, 3]
    )
    with pytest.raises(PointsError, match=r"intensity × 2000.*not 0\.\.255"):
        read_points(path, intensity_scale=2000.0)


def test_four_columns_with_intensities_to_255_are_read_as_the_message_says(tmp_path):
    points = kitti(200)
    points[:, 3] = np.round(points[:, 3] * 255)
    path = written(tmp_path, points)
    with pytest.raises(PointsError, match=r"0\.\.255 already are read with columns=4"):
        read_points(path)
    for said in ({"columns": 4}, {"columns": 4, "dtype": "float32"}, {"intensity_scale": 1.0}):
        np.testing.assert_array_equal(read_points(path, **said).points[:, 3], points[:, 3])
    points[:, 3] *= 257  # 16 bits
    path = written(tmp_path, points)
    with pytest.raises(PointsError, match="fit no layout"):
        read_points(path, columns=4)
    assert read_points(path, intensity_scale=1 / 257).points[:, 3].max() <= 255.5


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 7, 12, 16, 18, 19])
def test_truncated_file_is_refused_with_what_was_tried(tmp_path, cut):
    path = tmp_path / "cut.pcd.bin"
    raw = cloud(101).tobytes()[:-cut]
    path.write_bytes(raw)
    with pytest.raises(PointsError, match=rf"cut\.pcd\.bin: {len(raw)} bytes .*truncated") as info:
        read_points(path)
    assert "nuScenes, 5 × float32" in str(info.value)
    assert "KITTI, 4 × float32" in str(info.value)


def test_three_columns_fit_nothing(tmp_path):
    path = written(tmp_path, cloud(40)[:, :3])
    with pytest.raises(PointsError, match=r"480 bytes fit no layout tried .*intensity spans"):
        read_points(path)


def test_wrong_columns_said_explicitly(tmp_path):
    path = written(tmp_path, cloud(40))
    with pytest.raises(PointsError, match=r"640 bytes|800 bytes fit no layout"):
        read_points(path, columns=4)
    with pytest.raises(PointsError, match=r"columns=6: .*4 columns \(KITTI\) or 5"):
        read_points(path, columns=6)
    with pytest.raises(PointsError, match="dtype='int32'"):
        read_points(path, dtype="int32")
    with pytest.raises(PointsError, match="nonfinite='ignore'"):
        read_points(path, nonfinite="ignore")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_refused_or_dropped(tmp_path, bad, caplog):
    points = cloud(60)
    points[7, 1] = bad
    points[9, 3] = bad
    path = written(tmp_path, points)
    with pytest.raises(PointsError, match="2 of 60 rows hold NaN or Inf, the first is row 7"):
        read_points(path)
    left = read_points(path, nonfinite="drop").points
    np.testing.assert_array_equal(left[:, :4], np.delete(points, [7, 9], axis=0)[:, :4])
    assert "2 of 60 rows" in caplog.text


def test_nothing_but_nan(tmp_path):
    path = written(tmp_path, np.full((16, 5), np.nan, np.float32))
    with pytest.raises(PointsError, match="rows hold NaN or Inf"):
        read_points(path)
    with pytest.raises(PointsError, match="nothing is left"):
        read_points(path, columns=5, dtype="float32", nonfinite="drop")


def test_empty_file(tmp_path):
    (tmp_path / "empty.bin").touch()
    with pytest.raises(PointsError, match=r"empty\.bin: the file is empty \(0 bytes\)"):
        read_points(tmp_path / "empty.bin")
