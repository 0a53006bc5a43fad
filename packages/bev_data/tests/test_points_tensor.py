from __future__ import annotations

import struct

import numpy as np
import pytest

from bev_data.points import PointsError, load_tensor, read_frames, read_points, save_tensor

FEATURES = np.arange(15, dtype=np.float16).reshape(3, 5)
INDICES = np.array([[0, 1, 2, 3], [0, 4, 5, 6], [0, 7, 8, 9]], np.int32)
FILES = ("in_features.torch.fp16.tensor", "in_indices_xyz.torch.int32.tensor")


def pair(folder, features=FEATURES, indices=INDICES, names=FILES):
    save_tensor(folder / names[0], features)
    save_tensor(folder / names[1], indices)
    return folder / names[0], folder / names[1]


def test_layout_is_the_documented_one(tmp_path):
    raw = struct.pack("<Iiiii", 0x33FF1101, 2, 2, 3, 5) + FEATURES.tobytes()
    (tmp_path / "a.tensor").write_bytes(raw)
    np.testing.assert_array_equal(load_tensor(tmp_path / "a.tensor"), FEATURES)
    save_tensor(tmp_path / "b.tensor", FEATURES)
    assert (tmp_path / "b.tensor").read_bytes() == raw


@pytest.mark.parametrize(
    "dtype", ["int32", "float16", "float32", "int64", "uint64", "uint32", "int8", "uint8"]
)
def test_round_trip(tmp_path, dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    save_tensor(tmp_path / "a.tensor", array)
    back = load_tensor(tmp_path / "a.tensor")
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_type_that_the_format_lacks(tmp_path):
    with pytest.raises(PointsError, match="cannot hold float64"):
        save_tensor(tmp_path / "a.tensor", np.zeros(3))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("columns", [4, 5])
def test_points(tmp_path, dtype, columns):
    rows = np.arange(20, dtype=dtype).reshape(4, 5)[:, :columns]
    rows[:, 4:] /= 40  # seconds
    save_tensor(tmp_path / "points.tensor", rows)
    frame = read_points(tmp_path / "points.tensor")
    np.testing.assert_array_equal(frame.points[:, :columns], rows.astype(np.float32))
    assert frame.points.shape == (4, 5)
    assert frame.name == "points"


@pytest.mark.parametrize("given", [0, 1])
def test_either_file_of_a_pair_gives_the_voxels(tmp_path, given):
    frame = read_points(pair(tmp_path)[given])
    assert frame.points is None
    np.testing.assert_array_equal(frame.voxels.features, FEATURES.astype(np.float32))
    np.testing.assert_array_equal(frame.voxels.coords, INDICES)
    assert frame.name == tmp_path.name


def test_zyx_order_is_turned_round(tmp_path):
    names = ("a.in_features.tensor", "a.in_indices_zyx.tensor")
    frame = read_points(pair(tmp_path, names=names)[0])
    np.testing.assert_array_equal(frame.voxels.coords, INDICES[:, [0, 3, 2, 1]])
    assert frame.name == "a"


def test_several_pairs_in_a_folder_are_told_apart(tmp_path):
    for mark in ("a.", "b."):
        pair(tmp_path, names=tuple(mark + name for name in FILES))
    pair(tmp_path, names=("in_features.7.tensor", "in_indices_xyz.7.tensor"))
    pair(tmp_path, names=("in_features.8.tensor", "in_indices_xyz.8.tensor"))
    assert len(read_frames(tmp_path)) == 4


def test_missing_sibling(tmp_path):
    features, indices = pair(tmp_path)
    indices.unlink()
    with pytest.raises(PointsError, match=r"one in_indices_xyz\*\.tensor beside it, found none"):
        read_points(features)
    save_tensor(indices, INDICES)
    features.unlink()
    with pytest.raises(PointsError, match=r"one in_features\*\.tensor beside it, found none"):
        read_points(indices)
    with pytest.raises(PointsError, match="in_features"):
        read_frames(tmp_path)


@pytest.mark.parametrize(
    ("features", "indices", "message"),
    [
        (FEATURES[:2], INDICES, "has 2 voxels but .* has 3"),
        (FEATURES[:, :4], INDICES, r"float16 \[3, 4\]; expected floating point \[voxels, 5\]"),
        (FEATURES.astype(np.int32), INDICES, r"int32 \[3, 5\]"),
        (FEATURES, INDICES[:, :3], r"int32 \[3, 3\]; expected int32 \[voxels, 4\]"),
        (FEATURES, INDICES.astype(np.float32), r"float32 \[3, 4\]; expected int32"),
        (FEATURES, INDICES - 2, "negative coordinate in row 0"),
        (FEATURES * np.float16(np.nan), INDICES, "3 of 3 rows hold NaN or Inf"),
        (FEATURES[:0], INDICES[:0], "holds no points"),
    ],
)
def test_voxels_that_are_none(tmp_path, features, indices, message):
    path, _ = pair(tmp_path, features, indices)
    with pytest.raises(PointsError, match=message):
        read_points(path)


def test_dropping_voxels_keeps_the_pairs_together(tmp_path):
    features = FEATURES.copy()
    features[1, 2] = np.nan
    frame = read_points(pair(tmp_path, features)[0], nonfinite="drop")
    np.testing.assert_array_equal(frame.voxels.coords, INDICES[[0, 2]])
    np.testing.assert_array_equal(frame.voxels.features, FEATURES[[0, 2]].astype(np.float32))


GOOD = struct.pack("<Iiiii", 0x33FF1101, 2, 3, 2, 5) + bytes(40)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "0 bytes are too few for a .tensor header"),
        (GOOD[:11], "11 bytes are too few"),
        (b"\x00" + GOOD[1:], "magic number 0x33FF1100, expected 0x33FF1101"),
        (GOOD[:8] + struct.pack("<i", 9) + GOOD[12:], "unknown type code 9; known are 1 int32"),
        (GOOD[:4] + struct.pack("<i", 0) + GOOD[8:], "0 dimensions do not fit"),
        (GOOD[:4] + struct.pack("<i", -1) + GOOD[8:], "-1 dimensions do not fit"),
        (GOOD[:4] + struct.pack("<i", 2**30) + GOOD[8:], "1073741824 dimensions do not fit"),
        (GOOD[:12] + struct.pack("<i", -2) + GOOD[16:], r"impossible shape \[-2, 5\]"),
        (GOOD[:-1], r"shape \[2, 5\] of float32 needs 40 bytes of data, the file has 39"),
        (GOOD + b"\x00", "needs 40 bytes of data, the file has 41"),
        (struct.pack("<Iii", 0x33FF1101, 2, 3) + b"\xff\xff\xff\x7f" * 2, "the file has 0"),
    ],
)
def test_damaged_files(tmp_path, raw, message):
    path = tmp_path / "a.tensor"
    path.write_bytes(raw)
    with pytest.raises(PointsError, match=message):
        read_points(path)


def test_tensor_that_is_neither_points_nor_voxels(tmp_path):
    save_tensor(tmp_path / "camera.tensor", np.zeros((1, 6, 3, 2), np.float16))
    with pytest.raises(PointsError, match=r"float16 \[1, 6, 3, 2\]; expected points"):
        read_points(tmp_path / "camera.tensor")
