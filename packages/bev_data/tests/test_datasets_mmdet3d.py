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


def opened(infos, change=lambda content: None, name="infos.pkl", **options):
    content, folder = infos
    content = copy.deepcopy(content)
    change(content)
    (folder / name).write_bytes(pickle.dumps(content))
    return open_dataset("mmdet3d", folder / name, **options)


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


AXES = {"axes": "right,forward,up"}


def own(content):
    content["metainfo"] = {"classes": ["car", "bus"], "dataset": "ours"}


def test_own_data_need_axes_and_the_origin_of_boxes(infos):
    with pytest.raises(InputError, match=r"say box_origin='bottom' .* or box_origin='centre'"):
        opened(infos, own, **AXES)[0]
    boxes = opened(infos, own, **AXES, box_origin="bottom")[0].labels.boxes
    assert boxes[0, 2] == pytest.approx(-1 + 1.5 / 2)
    assert opened(infos, own, **AXES, box_origin="centre")[0].labels.boxes[0, 2] == -1
    assert opened(infos, own, **AXES, box_origin="centre").kind == "mmdet3d"
    for dataset in ("ours", "lyft", ""):
        with pytest.raises(InputError, match=rf"dataset='{dataset}'.*; say axes='forward,left,up'"):
            opened(infos, lambda c, name=dataset: c["metainfo"].update(dataset=name))
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
    said |= AXES
    frame = opened(infos, change, **said)[0]
    np.testing.assert_array_equal(frame.points[:, 4], rows[:, 5])
    assert frame.name == "000_00000"
    with pytest.raises(InputError, match=r"1 of 1 LiDAR frames have no matching images"):
        opened(infos, change, columns=said["columns"], **AXES)
    with pytest.raises(InputError, match="colums: files have the options columns"):
        opened(infos, change, colums=6)


def forward_axes(boxes):
    """The centre and the yaw of a box with x forward, in a frame's axes."""
    x, y, z, length, width, height, yaw = boxes
    return [-y, x, z + height / 2, length, width, height, yaw + np.pi / 2]


TO_CAMERA = np.array([[0.0, -1, 0, 0.1], [0, 0, -1, -0.2], [1, 0, 0, -0.3], [0, 0, 0, 1]])
"""From x forward, y left to a camera that looks ahead."""


def of_camera(box):
    """A box of the LiDAR, by the middle of its bottom, in the camera's coordinates."""
    x, y, z, length, width, height, yaw = box
    return [*(TO_CAMERA @ [x, y, z, 1])[:3], length, height, width, -yaw - np.pi / 2]


def kitti_like(content):
    record, image = content["data_list"][0], content["data_list"][0]["images"].pop("CAM_FRONT")
    del record["lidar_sweeps"], record["timestamp"]
    image["cam2img"] = [[50.0, 0, 32, 5], [0, 50, 18, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    image |= {"img_path": "000007.png", "lidar2cam": TO_CAMERA}
    record["images"] = {"CAM0": {"cam2img": np.eye(4)}, "CAM2": image, "R0_rect": np.eye(4)}
    record["lidar_points"] = {"num_pts_feats": 4, "lidar_path": "000007.bin"}
    record["instances"] = [{"bbox_3d": of_camera(BOX), "bbox_label_3d": 0}]
    content["metainfo"] = {"categories": {"Car": 0, "Tram": 6}, "dataset": "kitti"}


@pytest.fixture
def kitti(infos):
    rows = cloud(0)[:, :4] / [1, 1, 1, 32]
    for split, shift in (("training", 0), ("testing", 1)):
        for folder in ("velodyne", "image_2"):
            (infos[1] / split / folder).mkdir(parents=True)
        shifted = (rows + np.array([shift, 0, 0, 0])).astype("<f4")
        shifted.tofile(infos[1] / split / "velodyne/000007.bin")
        Image.new("RGB", (64, 36)).save(infos[1] / split / "image_2/000007.png")
    return infos, rows


def test_kitti_has_x_forward_and_boxes_of_the_camera(kitti):
    infos, rows = kitti
    frames = opened(infos, kitti_like)
    frame = frames[0]
    assert (frames.kind, frame.labels.names) == ("kitti", ("car",))
    np.testing.assert_allclose(frame.points[:, 0], -rows[:, 1], atol=1e-6)
    np.testing.assert_allclose(frame.points[:, 3], 255 * rows[:, 3], rtol=1e-6)
    np.testing.assert_allclose(frame.labels.boxes[0], forward_axes(BOX), atol=1e-5)
    (camera,) = frame.cameras
    x, y, z, _ = rows[0]
    pixel = np.array([[50.0, 0, 32, 5], [0, 50, 18, 0], [0, 0, 1, 0]]) @ TO_CAMERA @ [x, y, z, 1]
    own = camera.intrinsics @ (camera.lidar_to_camera @ [-y, x, z, 1])[:3]
    np.testing.assert_allclose(own, pixel)
    with pytest.raises(InputError, match="box_origin='centre': boxes of kitti are the camera's"):
        opened(infos, kitti_like, box_origin="centre")
    testing = opened(infos, kitti_like, name="kitti_infos_test.pkl")[0]
    np.testing.assert_allclose(testing.points[:, 1], rows[:, 0] + 1, atol=1e-6)


@pytest.mark.parametrize("version", ["mmdet3d_v1.4", "1.1"])
def test_waymo_has_x_forward(infos, version):
    raw = np.column_stack([cloud(0)[:, :3], np.linspace(0, 3, 61), np.ones((61, 2))])
    (infos[1] / "training/velodyne").mkdir(parents=True)
    (infos[1] / "training/image_0").mkdir()
    raw.astype("<f4").tofile(infos[1] / "training/velodyne/0000000.bin")
    Image.new("RGB", (64, 36)).save(infos[1] / "training/image_0/0000000.jpg")

    def change(content):
        record = content["data_list"][0]
        record["lidar_points"] = {"num_pts_feats": 6, "lidar_path": "0000000.bin"}
        record["images"]["CAM_FRONT"] |= {"img_path": "0000000.jpg", "lidar2cam": TO_CAMERA}
        box = BOX if version == "mmdet3d_v1.4" else of_camera(BOX)
        record["instances"] = [{"bbox_3d": box, "bbox_label_3d": 1}]
        meta = {"categories": {"Car": 0, "Pedestrian": 1}, "dataset": "waymo"}
        content["metainfo"] = {**meta, "info_version": version}

    frame = opened(infos, change)[0]
    np.testing.assert_allclose(frame.points[:, 1], raw[:, 0], rtol=1e-6)
    np.testing.assert_allclose(frame.points[:, 3], 255 * raw[:, 3].clip(0, 1), rtol=1e-5)
    assert not frame.points[:, 4].any()
    np.testing.assert_allclose(frame.labels.boxes[0], forward_axes(BOX), atol=1e-5)
    assert (frame.labels.names, frame.cameras[0].name) == (("pedestrian",), "CAM_FRONT")


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
