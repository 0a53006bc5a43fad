"""mmdetection3d's info files: one of nuScenes, written here, and the real keyframe's."""

from __future__ import annotations

import copy
import pickle
import shutil

import numpy as np
import pytest
from PIL import Image

from bev_data import InputError
from bev_data.datasets import open_dataset

TURN = np.array([[0.0, -1, 0, 0.5], [1, 0, 0, 0.25], [0, 0, 1, 0], [0, 0, 0, 1]])
"""From the earlier sweep to the keyframe."""
POSE = np.array([[1.0, 0, 0, 0], [0, 0, -1, -0.3], [0, 1, 0, -0.7], [0, 0, 0, 1]])
BOX = [8.0, 3.0, -1.0, 4.0, 2.0, 1.5, 0.3]


def cloud(seed: int, rows: int = 60) -> np.ndarray:
    rng = np.random.default_rng(seed)
    near = np.array([[0.2, -0.3, 0.1, 7, 3]])
    rows_ = np.column_stack([rng.uniform(2, 30, (rows, 3)), rng.integers(0, 255, (rows, 2)) % 32])
    return np.concatenate([rows_, near]).astype("<f4")


@pytest.fixture
def infos(tmp_path):
    """The info file's content, and the folder with its files."""
    for folder in ("samples/LIDAR_TOP", "sweeps/LIDAR_TOP", "samples/CAM_FRONT"):
        (tmp_path / folder).mkdir(parents=True)
    cloud(0).tofile(tmp_path / "samples/LIDAR_TOP/drive__1.pcd.bin")
    cloud(1).tofile(tmp_path / "sweeps/LIDAR_TOP/drive__0.pcd.bin")
    Image.new("RGB", (64, 36)).save(tmp_path / "samples/CAM_FRONT/1.jpg")
    sweep = {
        "timestamp": 9.95,
        "lidar_points": {
            "lidar_path": "./data/nuscenes/sweeps/LIDAR_TOP/drive__0.pcd.bin",
            "lidar2sensor": np.linalg.inv(TURN).astype(np.float32).tolist(),
        },
    }
    record = {
        "sample_idx": 0, "timestamp": 10.0, "ego2global": np.eye(4),
        "lidar_points": {"num_pts_feats": 5, "lidar_path": "drive__1.pcd.bin"},
        "lidar_sweeps": [sweep],
        "images": {"CAM_FRONT": {
            "img_path": "1.jpg", "cam2img": [[50.0, 0, 32], [0, 50, 18], [0, 0, 1]],
            "lidar2cam": POSE,
        }},
        "instances": [
            {"bbox_3d": BOX, "bbox_label_3d": 1, "num_lidar_pts": np.int64(5),
             "velocity": np.array([1.0, -2.0]), "bbox_3d_isvalid": np.bool_(True)},
            {"bbox_3d": BOX, "bbox_label_3d": -1, "num_lidar_pts": 2, "velocity": [0.0, 0.0]},
            {"bbox_3d": BOX, "bbox_label_3d": 0, "num_lidar_pts": 0,
             "velocity": [float("nan")] * 2},
        ],
    }  # fmt: skip
    meta = {"categories": {"car": 0, "bus": 1, "animal": -1}, "dataset": "nuscenes"}
    return {"metainfo": meta, "data_list": [record]}, tmp_path


def opened(infos, change=lambda content: None, **options):
    content, folder = infos
    content = copy.deepcopy(content)
    change(content)
    (folder / "infos.pkl").write_bytes(pickle.dumps(content))
    return open_dataset("mmdet3d", folder / "infos.pkl", **options)


def test_a_frame_with_sweeps_cameras_and_labels(infos):
    frames = opened(infos)
    assert (frames.kind, len(frames), frames[0].name) == ("nuscenes", 1, "drive_00000")
    points = frames[0].points
    assert len(points) == 61 + 60  # the earlier sweep's roof is left out
    np.testing.assert_array_equal(points[:61, :4], cloud(0)[:, :4])
    moved = cloud(1)[:60, :3].astype(np.float64) @ TURN[:3, :3].T + TURN[:3, 3]
    np.testing.assert_allclose(points[61:, :3], moved, atol=1e-5)
    np.testing.assert_allclose(points[:, 4], np.repeat([0, 0.05], [61, 60]), atol=1e-6)
    labels = frames[0].labels
    assert labels.names == ("bus", "car")
    np.testing.assert_allclose(labels.boxes, np.float32([BOX, BOX]))
    np.testing.assert_array_equal(labels.velocities, [[1, -2], [np.nan, np.nan]])
    assert labels.num_points.tolist() == [5, 0]
    (camera,) = frames[0].cameras
    np.testing.assert_array_equal(camera.lidar_to_camera, POSE)
    assert (camera.name, camera.width) == ("CAM_FRONT", 64)
    assert len(opened(infos, sweeps=1)[0].points) == 61
    assert opened(infos, cameras="none")[0].cameras == ()


def test_classes_get_other_names(infos):
    assert opened(infos, classes={"bus": "truck"})[0].labels.names == ("truck", "car")
    with pytest.raises(InputError, match=r"renames lorry, no class of .*, which has car, bus"):
        opened(infos, classes={"lorry": "truck"})


def test_axes_turn_points_labels_and_cameras(infos):
    straight, turned = opened(infos)[0], opened(infos, axes="forward,left,up")[0]
    np.testing.assert_allclose(turned.points[:, 0], -straight.points[:, 1])
    np.testing.assert_allclose(turned.labels.boxes[:, 1], straight.labels.boxes[:, 0])
    point = np.array([3.0, 4, 1, 1])
    np.testing.assert_allclose(
        turned.cameras[0].lidar_to_camera @ [-point[1], point[0], 1, 1], POSE @ point
    )


def own(content):
    content["metainfo"] = {"classes": ["car", "bus"], "dataset": "ours"}


def test_boxes_of_own_data_need_their_origin(infos):
    with pytest.raises(InputError, match=r"say box_origin='bottom' .* or box_origin='centre'"):
        opened(infos, own)[0]
    boxes = opened(infos, own, box_origin="bottom")[0].labels.boxes
    assert boxes[0, 2] == pytest.approx(-1 + 1.5 / 2)
    assert opened(infos, own, box_origin="centre")[0].labels.boxes[0, 2] == -1
    assert opened(infos, own, box_origin="centre").kind == "mmdet3d"
    with pytest.raises(InputError, match="box_origin='top': expected 'centre' or 'bottom'"):
        opened(infos, own, box_origin="top")


def test_own_data_without_sweeps_keep_their_columns(infos):
    def change(content):
        own(content)
        record = content["data_list"][0]
        record["lidar_points"] = {"num_pts_feats": 6, "lidar_path": "000.bin"}
        del record["lidar_sweeps"], record["timestamp"], record["images"]

    folder = infos[1]
    (folder / "points").mkdir()
    rows = np.column_stack([cloud(0), np.linspace(0, 0.1, 61)]).astype("<f4")
    rows.tofile(folder / "points/000.bin")
    said = {"columns": "x,y,z,intensity,ring,time", "box_origin": "centre", "cameras": "none"}
    frame = opened(infos, change, **said)[0]
    np.testing.assert_array_equal(frame.points[:, 4], rows[:, 5])
    assert frame.name == "000_00000"
    with pytest.raises(InputError, match=r"1 of 1 LiDAR frames have no matching images"):
        opened(infos, change, columns=said["columns"])
    with pytest.raises(InputError, match="colums: files have the options columns"):
        opened(infos, change, colums=6)


def test_a_test_set_has_no_labels(infos):
    assert opened(infos, lambda c: c["data_list"][0].update(instances=[]))[0].labels is None


def record_with(**values):
    return lambda content: content["data_list"][0].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (record_with(instances=[{"bbox_3d": BOX[:6], "bbox_label_3d": 0}]), "length 7"),
        (record_with(instances=[{"bbox_3d": BOX, "bbox_label_3d": 7}]), "label 7 is none of"),
        (record_with(lidar_points={}), "missing required field `lidar_path`"),
        (record_with(lidar_points={"lidar_path": "gone.bin"}), "gone.bin: no such file in"),
        (record_with(timestamp=None), "sweeps without the frame's timestamp"),
        (record_with(timestamp=1.5e15), "its lag is 1.5e.15 s; expected timestamps"),
        (record_with(images={"CAM_FRONT": {"img_path": "1.jpg", "cam2img": [[1.0]]}}), "lidar2cam"),
        (record_with(images={"CAM_FRONT": {"img_path": "no.jpg", "cam2img": [[1.0]],
                     "lidar2cam": POSE}}), r"cam2img is \[1, 1\]"),
    ],
)  # fmt: skip
def test_damaged_records(infos, change, message):
    with pytest.raises(InputError, match=message):
        opened(infos, change)[0]


def test_files_of_another_form(infos):
    content, folder = infos
    path = folder / "infos.pkl"
    for held, message in (
        ({"infos": [], "metadata": {"version": "v1.0-mini"}}, "update_infos_to_v2.py"),
        ([{"lidar_path": "a"}], "update_infos_to_v2.py"),
        ({"data_list": []}, "expected a dict with metainfo and a list data_list"),
        ({**content, "metainfo": {"dataset": "kitti"}}, "open_dataset.'kitti'"),
        ({**content, "metainfo": {"dataset": "waymo"}}, "write_frame_folder"),
        ({**content, "metainfo": {"categories": 3}}, "categories is no dict"),
        ({"metainfo": np.random.default_rng(0)}, "class numpy.random"),
    ):
        path.write_bytes(pickle.dumps(held))
        with pytest.raises(InputError, match=rf"infos\.pkl.*{message}"):
            open_dataset("mmdet3d", path)
    path.write_bytes(b"cos\nsystem\n(S'touch " + str(folder).encode() + b"/made'\ntR.")
    with pytest.raises(InputError, match=r"object of the class os\.system"):
        open_dataset("mmdet3d", path)
    assert not (folder / "made").exists()
    for whole in (pickle.dumps(content)[:-30], b"", b"no pickle"):
        path.write_bytes(whole)
        with pytest.raises(InputError, match="damaged, cut short or something else"):
            open_dataset("mmdet3d", path)
    with pytest.raises(InputError, match=r"a folder; give its info file .* it has infos\.pkl"):
        open_dataset("mmdet3d", folder)
    with pytest.raises(InputError, match=r"gone\.pkl"):
        open_dataset("mmdet3d", folder / "gone.pkl")


def test_the_real_keyframe(keyframe_info, tmp_path):
    (path,) = keyframe_info["folder"].glob("*.pkl")
    frame = open_dataset("mmdet3d", path)[0]
    assert frame.points.shape == (34688, 5)
    assert len(frame.cameras) == 6
    shown = [one for one in keyframe_info["instances"] if one["bbox_label_3d"] >= 0]
    np.testing.assert_allclose(frame.labels.boxes, np.float32([one["bbox_3d"] for one in shown]))
    names = [keyframe_info["classes"][one["bbox_label_3d"]] for one in shown]
    assert list(frame.labels.names) == names
    shutil.copy(path, tmp_path / "infos.pkl")
    assert len(open_dataset("mmdet3d", tmp_path / "infos.pkl", root=path.parent)[0]) == 34688
    with pytest.raises(InputError, match="give that folder as root="):
        open_dataset("mmdet3d", tmp_path / "infos.pkl")[0]
