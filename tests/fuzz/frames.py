"""Files of frames and data sets: points, calibrations, labels, what training prepares."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.mutate import changed_bytes, changed_json, changed_npz, changed_text
from fuzz.target import Target, written


class Devkit:
    """What nuscenes-devkit does with the tables where it is not installed: loads, and looks up."""

    def __init__(self, version: str, dataroot: str, verbose: bool) -> None:
        self.version, self.dataroot = version, dataroot
        for path in (Path(dataroot) / version).glob("*.json"):
            setattr(self, path.stem, json.loads(path.read_bytes()))
        self.rows = {
            (name, row["token"]): row
            for name, rows in vars(self).items()
            if isinstance(rows, list)
            for row in rows
        }
        for row in self.rows.values():
            if "sample_token" in row:
                sample = self.get("sample", row["sample_token"])
                if "channel" in row:
                    sample.setdefault("data", {})[row["channel"]] = row["token"]
                else:
                    sample.setdefault("anns", []).append(row["token"])

    def get(self, table: str, token: str) -> Any:
        return self.rows[table, token]

    def box_velocity(self, token: str) -> Any:
        here = self.get("sample_annotation", token)
        before = self.get("sample_annotation", here["prev"]) if here["prev"] else here
        return np.array(here["translation"]) - np.array(before["translation"])


def nuscenes() -> Target:
    from types import ModuleType

    from bevfusion_quant.datasets import open_dataset

    module: Any = ModuleType("nuscenes.nuscenes")
    module.NuScenes = Devkit
    pose = {"rotation": [1.0, 0, 0, 0], "translation": [0.1, 0.2, 0.3]}
    end = {"prev": "", "next": ""}
    lidar = {"sample_token": "s", "ego_pose_token": "e", "calibrated_sensor_token": "c",
             "channel": "LIDAR_TOP", "width": 0, "height": 0, "next": ""}  # fmt: skip
    tables: dict[str, list[dict[str, Any]]] = {
        "scene": [{"token": "n", "name": "scene-1", "first_sample_token": "s"}],
        "sample": [{"token": "s", **end}],
        "category": [{"token": "k", "name": "vehicle.car"}],
        "ego_pose": [{"token": "e", **pose}],
        "calibrated_sensor": [{"token": "c", "camera_intrinsic": [], **pose}],
        "sample_data": [
            {"token": "d", "timestamp": 200, "filename": "1.bin", "prev": "b", **lidar},
            {"token": "b", "timestamp": 100, "filename": "0.bin", "prev": "", **lidar},
        ],
        "sample_annotation": [
            {"token": "a", "sample_token": "s", "visibility_token": "4", "size": [1.9, 4.5, 1.6],
             "category_name": "vehicle.car", "num_lidar_pts": 7, **pose, **end},
        ],
    }  # fmt: skip
    rows = np.random.default_rng(0).uniform(2, 9, (40, 5)).astype("<f4").tobytes()
    files = {f"v1.0-mini/{name}.json": json.dumps(t).encode() for name, t in tables.items()}

    def read(folder: Path) -> None:
        others = {name: sys.modules.get(name) for name in ("nuscenes", "nuscenes.nuscenes")}
        sys.modules |= {"nuscenes": ModuleType("nuscenes"), "nuscenes.nuscenes": module}
        try:
            list(open_dataset("nuscenes", folder, cameras="none"))
        finally:
            for name, other in others.items():
                if other is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = other

    return Target(files | {"0.bin": rows, "1.bin": rows}, dict.fromkeys(files, changed_json), read)


def mmdet3d() -> Target:
    from bev_data.datasets import open_dataset

    sweep = {"timestamp": 0.9, "lidar_points": {"lidar_path": "1.bin", "lidar2sensor": np.eye(4)}}
    box = {"bbox_3d": [1, 2, 0, 4, 2, 1.5, 0.1], "bbox_label_3d": 0, "num_lidar_pts": 7}
    record = {
        "lidar_points": {"lidar_path": "0.bin", "num_pts_feats": 5}, "timestamp": 1.0,
        "lidar_sweeps": [sweep], "instances": [box],
    }  # fmt: skip
    meta = {"categories": {"car": 0}, "dataset": "nuscenes"}
    rows = np.random.default_rng(0).uniform(2, 9, (40, 5)).astype("<f4").tobytes()
    infos = pickle.dumps({"metainfo": meta, "data_list": [record]})
    files = {"infos.pkl": infos, "0.bin": rows, "1.bin": rows}

    def read(folder: Path) -> None:
        list(open_dataset("mmdet3d", folder / "infos.pkl", cameras="none"))

    return Target(files, {"infos.pkl": changed_bytes}, read)


def prepared_frame() -> Target:
    from bev_data.points import Frame, Labels
    from bevfusion.training import CompactFrame, compact

    labels = Labels(np.ones((2, 7), np.float32), ("car", "bus"))
    frame = Frame("f", np.ones((9, 5), np.float32), labels=labels)
    files = written(lambda f: compact(frame, None).save(f / "p.npz"))

    def read(folder: Path) -> None:
        found = CompactFrame.load(folder / "p.npz")
        str((found.points, found.labels, found.network_images()))

    return Target(files, {"p.npz": changed_npz}, read)


def points_npz() -> Target:
    from bev_data.points import read_points

    arrays = {
        "points": np.ones((20, 5), np.float32), "boxes": np.ones((2, 7)),
        "names": np.array(["car", "bus"]),
    }  # fmt: skip
    files = written(lambda f: np.savez_compressed(f / "p.npz", **arrays))
    return Target(files, {"p.npz": changed_npz}, lambda f: read_points(f / "p.npz"))


def points_binary() -> Target:
    from bev_data.points import read_points

    rows = np.random.default_rng(0).uniform(0, 1, (41, 4)).astype("<f4")
    files = {"p.bin": rows.tobytes()}
    return Target(files, {"p.bin": changed_bytes}, lambda f: read_points(f / "p.bin"))


def points_tensor() -> Target:
    from bev_data.points import read_points, save_tensor

    files = written(lambda f: save_tensor(f / "p.tensor", np.ones((20, 5), np.float32)))
    return Target(files, {"p.tensor": changed_bytes}, lambda f: read_points(f / "p.tensor"))


def points_pcd() -> Target:
    from point_files import drive, write_pcd

    from bev_data.points import read_points

    names = ("ascii", "binary", "binary_compressed")
    files = written(lambda f: [write_pcd(f / f"{n}.pcd", drive(20), n) for n in names])

    def read(folder: Path) -> None:
        for name in names:
            read_points(folder / f"{name}.pcd")

    return Target(files, dict.fromkeys(files, changed_bytes), read)


def points_npy() -> Target:
    from point_files import drive, records

    from bev_data.points import read_points

    files = written(lambda f: np.save(f / "p.npy", records(drive(20))))
    return Target(files, {"p.npy": changed_bytes}, lambda f: read_points(f / "p.npy"))


def frame_folder() -> Target:
    from bev_data.cameras import Camera
    from bev_data.datasets import open_dataset, write_frame_folder
    from bev_data.points import Frame, Labels

    labels = Labels(np.ones((2, 7), np.float32), ("car", "bus"))
    camera = Camera("CAM_FRONT", np.zeros((8, 9, 3), np.uint8), np.diag([9.0, 9.0, 1.0]), np.eye(4))
    frame = Frame("f", np.ones((9, 5), np.float32), labels=labels, cameras=(camera,))
    files = written(lambda f: write_frame_folder(f / "frame", frame))
    change = {"frame/calib.json": changed_json, "frame/CAM_FRONT.png": changed_bytes}
    read = lambda f: open_dataset("files", [f / "frame"])[0]  # noqa: E731
    return Target(files, change, read)


def pandaset() -> Target:
    from PIL import Image

    from bev_data.datasets import open_dataset

    def write(folder: Path) -> None:
        points, boxes = np.ones((20, 5), np.float32), np.ones((2, 7))
        np.savez(folder / "frame_00.npz", points=points, boxes=boxes, names=["Car", "Bus"])
        own = dict.fromkeys(("fx", "fy", "cx", "cy"), 900.5)
        pose = {"cam2ego": np.eye(4).tolist()}
        around = ("front", "front_right", "front_left", "back", "left", "right")
        cameras = [f"{name}_camera" for name in around]
        calibration = {
            "intrinsics": {name: own for name in cameras},
            "frames": {"00": {"cams": {name: pose for name in cameras}}},
        }
        (folder / "calib.json").write_text(json.dumps(calibration))
        for name in cameras:
            (folder / "camera" / name).mkdir(parents=True)
            Image.new("L", (1920, 1080)).save(folder / "camera" / name / "00.jpg", quality=1)

    files = written(write)
    change = {"calib.json": changed_json, "frame_00.npz": changed_npz}

    def read(folder: Path) -> None:
        # Six pictures of two megapixels take longer than all the rest: one mutant in eight.
        which = "all" if len((folder / "calib.json").read_bytes()) % 8 == 0 else "none"
        open_dataset("pandaset", folder, cameras=which)[0]

    return Target(files, change, read)


def kitti() -> Target:
    from PIL import Image

    from bev_data.datasets import open_dataset

    def write(folder: Path) -> None:
        for name in ("velodyne", "calib", "label_2", "image_2"):
            (folder / "training" / name).mkdir(parents=True)
        top = folder / "training"
        rows = np.random.default_rng(0).uniform(0, 1, (40, 4)).astype("<f4")
        rows.tofile(top / "velodyne" / "000000.bin")
        matrix = "7e0 0 4.5 0 0 7e0 4 0 0 0 1 0"
        turn = "0 -1 0 0 0 0 -1 0 1 0 0 0"
        text = f"P2: {matrix}\nR0_rect: 1 0 0 0 1 0 0 0 1\nTr_velo_to_cam: {turn}\n"
        (top / "calib" / "000000.txt").write_text(text)
        label = "Car 0.00 0 1.5 600 150 700 200 1.5 1.6 3.9 1.8 1.5 8.4 0.01\n"
        (top / "label_2" / "000000.txt").write_text(label)
        Image.fromarray(np.zeros((8, 9, 3), np.uint8)).save(top / "image_2" / "000000.png")

    change = {f"training/{n}/000000.txt": changed_text for n in ("calib", "label_2")}
    read = lambda f: open_dataset("kitti", f / "training")[0]  # noqa: E731
    return Target(written(write), change, read)


READERS: dict[str, tuple[int, Callable[[], Target]]] = {
    "points .npz": (4000, points_npz),
    "points .bin": (4000, points_binary),
    "points .tensor": (4000, points_tensor),
    "points .pcd": (4000, points_pcd),
    "points .npy": (4000, points_npy),
    "frame folder": (3000, frame_folder),
    "PandaSet sequence": (1000, pandaset),
    "KITTI frame": (1000, kitti),
    "nuScenes tables": (2500, nuscenes),
    "mmdetection3d's infos": (2500, mmdet3d),
    "prepared frame": (3000, prepared_frame),
}
