from __future__ import annotations

import numpy as np
import pytest

from bev_data.points import (
    Frame,
    Labels,
    PointsError,
    VoxelData,
    read_frames,
    read_points,
    save_tensor,
)

POINTS = np.arange(10, dtype=np.float32).reshape(2, 5)


def saved(folder, *names):
    for place, name in enumerate(names):
        np.savez(folder / name, points=POINTS + place)
    return folder


def test_folder_in_sorted_order_whatever_the_order_on_disk(tmp_path, caplog):
    caplog.set_level("INFO", logger="bev_data")
    saved(tmp_path, "b.npz", "a.npz", "c.npz")
    (tmp_path / "notes.txt").write_text("not a frame")
    (tmp_path / "inner").mkdir()
    frames = read_frames(tmp_path)
    assert [frame.name for frame in frames] == ["a", "b", "c"]
    assert [frame.points[0, 0] for frame in frames] == [1, 0, 2]
    assert "1 files of other kinds passed over" in caplog.text
    assert [frame.name for frame in frames[1:]] == ["b", "c"]
    assert frames[-1].name == "c"
    assert repr(frames) == "FrameFiles(3 files)"
    with pytest.raises(IndexError):
        frames[3]


def test_files_and_folders_mixed_keep_their_order(tmp_path):
    (tmp_path / "f").mkdir()
    saved(tmp_path, "z.npz")
    saved(tmp_path / "f", "a.npz", "b.npz")
    frames = read_frames([tmp_path / "z.npz", str(tmp_path / "f")])
    assert [frame.name for frame in frames] == ["z", "a", "b"]


def test_both_files_of_a_voxel_pair_are_one_frame(tmp_path):
    save_tensor(tmp_path / "in_features.tensor", POINTS)
    save_tensor(tmp_path / "in_indices_xyz.tensor", np.zeros((2, 4), np.int32))
    saved(tmp_path, "a.npz")
    assert len(read_frames(tmp_path)) == 2
    assert len(read_frames(sorted(tmp_path.glob("*.tensor")))) == 1


def test_frames_are_read_only_when_asked_for(tmp_path):
    saved(tmp_path, "a.npz")
    (tmp_path / "b.npz").write_bytes(b"broken")
    frames = read_frames(tmp_path)
    assert frames[0].name == "a"
    with pytest.raises(PointsError, match=r"b\.npz"):
        frames[1]


def test_options_reach_every_file(tmp_path):
    saved(tmp_path, "a.npz")
    frames = read_frames(tmp_path, intensity_scale=2.0)
    np.testing.assert_array_equal(frames[0:][0].points[:, 3], POINTS[:, 3] * 2)


def test_refused_before_anything_is_read(tmp_path):
    saved(tmp_path, "a.npz")
    with pytest.raises(PointsError, match=r"gone\.npz: no such file"):
        read_frames([tmp_path / "a.npz", tmp_path / "gone.npz"])
    with pytest.raises(PointsError, match=r"unknown extension '\.ply'; expected \.pcd\.bin"):
        read_frames([tmp_path / "a.ply"])
    with pytest.raises(PointsError, match="no frames given"):
        read_frames([])
    (tmp_path / "empty").mkdir()
    with pytest.raises(PointsError, match=r"the folder holds no frames \(0 other files\)"):
        read_frames(tmp_path / "empty")


def test_read_points_wants_one_file(tmp_path):
    with pytest.raises(PointsError, match=r"gone\.bin: no such file"):
        read_points(tmp_path / "gone.bin")
    (tmp_path / "folder.bin").mkdir()
    with pytest.raises(PointsError, match="a folder, not a file; read_frames reads folders"):
        read_points(tmp_path / "folder.bin")
    with pytest.raises(PointsError, match="a folder, not a file; read_frames reads folders"):
        read_points(tmp_path)
    with pytest.raises(PointsError, match=r"unknown extension '\(none\)'"):
        read_points(tmp_path / "points")


def test_name_leaves_out_the_whole_extension(tmp_path):
    (tmp_path / "n015__LIDAR_TOP__1.pcd.bin").write_bytes(POINTS.tobytes())
    frame = read_points(tmp_path / "n015__LIDAR_TOP__1.pcd.bin", columns=5, dtype="float32")
    assert frame.name == "n015__LIDAR_TOP__1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "exactly one"),
        ({"points": POINTS, "voxels": VoxelData(POINTS, np.zeros((2, 4), np.int32))}, "exactly"),
        ({"points": POINTS[:, :4]}, r"points must be float32 \[N, 5\], not float32 \[2, 4\]"),
        ({"points": POINTS.astype(np.float64)}, "not float64"),
        ({"voxels": VoxelData(POINTS, np.zeros((2, 4), np.int64))}, "coords must be int32"),
        ({"voxels": VoxelData(POINTS, np.zeros((3, 4), np.int32))}, "2 voxel features but 3"),
        ({"points": POINTS, "labels": Labels(np.zeros((1, 7), np.float32), ())}, "1 boxes but 0"),
    ],
)
def test_a_frame_that_contradicts_itself(content, message):
    with pytest.raises(PointsError, match=message):
        Frame("odd", **content)
