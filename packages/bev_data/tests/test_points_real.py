"""Real files, where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from point_files import records, write_pcd

from bev_data.datasets import open_dataset
from bev_data.points import PointsError, read_frames, read_points


@pytest.fixture(scope="module")
def data() -> Path:
    said = os.environ.get("BEVQUANT_DATA")
    folder = Path(said) if said else Path(__file__).resolve().parents[4] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no real data: set BEVQUANT_DATA")
    return folder


def test_nuscenes_keyframe(data, tmp_path):
    (path,) = (data / "mmdet3d_demo/nuscenes").glob("*LIDAR_TOP*.pcd.bin")
    frame = read_points(path)
    raw = np.fromfile(path, "<f4").reshape(-1, 5)
    assert frame.points.shape == (34688, 5)
    np.testing.assert_array_equal(frame.points[:, :4], raw[:, :4])
    assert not frame.points[:, 4].any()
    half = tmp_path / "half.bin"
    raw.astype("<f2").tofile(half)
    np.testing.assert_array_equal(
        read_points(half).points[:, :4], raw[:, :4].astype(np.float16).astype(np.float32)
    )
    for cut in (1, 4, 8, 12):
        (tmp_path / "cut.pcd.bin").write_bytes(path.read_bytes()[:-cut])
        with pytest.raises(PointsError, match="truncated"):
            read_points(tmp_path / "cut.pcd.bin")


def test_kitti_frames(data):
    folder = data / "avod_kitti13/object/training/velodyne"
    frames = read_frames(folder)
    assert len(frames) == 6
    for frame, path in zip(frames, frames.paths, strict=True):
        raw = np.fromfile(path, "<f4").reshape(-1, 4)
        np.testing.assert_array_equal(frame.points[:, :3], raw[:, :3])
        np.testing.assert_array_equal(frame.points[:, 3], raw[:, 3] * np.float32(255))
    assert any(path.stat().st_size % 20 == 0 for path in frames.paths)  # the ambiguous size


def test_nvidia_voxels(data):
    for name in ("in_features.torch.fp16.tensor", "in_indices_xyz.torch.int32.tensor"):
        frame = read_points(data / "nvidia_scn" / name)
        assert frame.name == "nvidia_scn"
        features, coords = frame.voxels
        assert features.shape == (79745, 5)
        assert coords.shape == (79745, 4)
        # The mean of a voxel's points lies in the voxel: axes, order and range are as documented.
        cells = (features[:, :3] + [54, 54, 5]) / [0.075, 0.075, 0.2]
        inside = np.abs(cells - (coords[:, 1:] + 0.5)).max(axis=1) < 0.5 + 0.4  # fp16 rounding
        assert inside.mean() > 0.999
        assert features[:, 3].max() <= 255
        assert features[:, 4].max() < 0.5


def test_pandaset_frames(data):
    frames = read_frames(data / "pandaset_002_compact")
    assert len(frames) == 20
    frame = frames[0]
    assert frame.points.shape == (106169, 5)
    assert frame.labels.boxes.shape == (91, 7)
    assert "Car" in frame.labels.names


def test_axes_and_times_are_those_of_the_data_sets(data):
    folder = data / "avod_kitti13"
    files = read_frames(folder / "object/training/velodyne", axes="forward,left,up")
    for got, frame in zip(files, open_dataset("kitti", folder, cameras="none"), strict=True):
        np.testing.assert_array_equal(got.points, frame.points)
    folder = data / "pandaset_002_compact"
    frame = open_dataset("pandaset", folder, cameras="none", origin_height=0)[0]
    got = read_frames(folder, axes="forward,left,up")[0]
    np.testing.assert_array_equal(got.points, frame.points)
    np.testing.assert_allclose(got.labels.boxes, frame.labels.boxes, atol=1e-5)
    assert 0 <= got.points[:, 4].min() < 0.002 < got.points[:, 4].max() < 0.11


@pytest.mark.parametrize("kind", ["pcd", "npy", "feather"])
def test_a_real_frame_in_other_formats(data, tmp_path, kind):
    frame = read_frames(data / "pandaset_002_compact")[0]
    names = ("x", "y", "z", "intensity", "time")
    columns = {name: frame.points[:5000, i] for i, name in enumerate(names)}
    path = tmp_path / f"a.{kind}"
    if kind == "pcd":
        write_pcd(path, columns, "binary_compressed")
    elif kind == "npy":
        np.save(path, records(columns))
    else:
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow (the extra feather) is missing")
        pytest.importorskip("pyarrow.feather").write_feather(pyarrow.table(columns), str(path))
    np.testing.assert_array_equal(read_points(path).points, frame.points[:5000])
