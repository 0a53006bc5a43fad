"""A miniature data set in nuScenes' format: the tables and files that nuscenes-devkit reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from bev_data.cameras import CAMERA_NAMES

__all__ = [
    "LIDAR",
    "MOUNTS",
    "PILLARS",
    "Tables",
    "about_z",
    "camera_mount",
    "ego_at",
    "quaternion",
    "write_mini",
]

SPEED = 5.0  # of the car [m/s]
STEP = 0.05  # between sweeps [s]


def quaternion(turn: np.ndarray) -> list[float]:
    """w, x, y, z of a rotation that is no half turn."""
    w = np.sqrt(max(0.0, 1 + np.trace(turn))) / 2
    if w < 1e-3:
        vector = np.linalg.eigh((turn + turn.T) / 2)[1][:, 2]
        return [0.0, *vector]
    off = turn - turn.T
    return [w, off[2, 1] / (4 * w), off[0, 2] / (4 * w), off[1, 0] / (4 * w)]


def about_z(angle: float, *shift: float) -> np.ndarray:
    motion = np.eye(4)
    motion[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    motion[:3, 3] = shift
    return motion


class Tables:
    """The tables of a data set in nuScenes' format."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rows: dict[str, list[dict]] = {
            name: []
            for name in (
                "category attribute visibility instance sensor calibrated_sensor ego_pose log "
                "scene sample sample_data sample_annotation map"
            ).split()
        }
        for level in "1234":
            self.add("visibility", level, level=level, description="")
        (root / "maps").mkdir(parents=True)
        Image.new("L", (4, 4)).save(root / "maps/map.png")
        self.add("map", "map", log_tokens=["log"], category="semantic", filename="maps/map.png")
        self.add("log", "log", logfile="", vehicle="", date_captured="", location="nowhere")

    def add(self, table: str, token: str, **values: object) -> str:
        self.rows[table].append({"token": token, **values})
        return token

    def pose(self, table: str, token: str, motion: np.ndarray, **values: object) -> str:
        return self.add(
            table,
            token,
            rotation=quaternion(motion[:3, :3]),
            translation=motion[:3, 3].tolist(),
            **values,
        )

    def sensor(self, channel: str, motion: np.ndarray, intrinsics: list) -> None:
        modality = "camera" if channel.startswith("CAM") else "lidar"
        self.add("sensor", channel, channel=channel, modality=modality)
        self.pose(
            "calibrated_sensor", channel, motion, sensor_token=channel, camera_intrinsic=intrinsics
        )

    def data(self, channel, sample, time, ego, filename, *, key, prev="", size=(0, 0)) -> str:
        token = f"{channel}@{time}"
        self.pose("ego_pose", token, ego, timestamp=time)
        return self.add(
            "sample_data",
            token,
            sample_token=sample,
            ego_pose_token=token,
            calibrated_sensor_token=channel,
            timestamp=time,
            fileformat=filename.rpartition(".")[2],
            is_key_frame=key,
            height=size[1],
            width=size[0],
            filename=filename,
            prev=prev,
            next="",
        )

    def write(self, version: str = "v1.0-mini") -> Path:
        (self.root / version).mkdir(exist_ok=True)
        for name, rows in self.rows.items():
            (self.root / version / f"{name}.json").write_text(json.dumps(rows))
        return self.root


LIDAR = about_z(-np.pi / 2 + 0.01, 0.94, 0.0, 1.84)
LOOK = np.array([[0.0, 0, 1], [-1, 0, 0], [0, -1, 0]])  # camera axes of one that looks along x
MOUNTS = dict(zip(CAMERA_NAMES, (0.0, -0.96, 0.96, 3.1, 1.92, -1.92), strict=True))
PILLARS = np.random.default_rng(3).uniform([-30, -30, 0], [40, 30, 4], (60, 3))  # in the world


def ego_at(time: float) -> np.ndarray:
    """Where the car is [time in s]: it drives and turns, and the road climbs."""
    motion = about_z(0.4 + 0.2 * time, SPEED * time, 0.3 * SPEED * time, 0.05 * SPEED * time)
    motion[:3, :3] = motion[:3, :3] @ rotation_x(0.02)
    return motion


def rotation_x(angle: float) -> np.ndarray:
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[1, 0, 0], [0, c, -s], [0, s, c]])


def camera_mount(angle: float) -> np.ndarray:
    motion = about_z(angle, 1.2 * np.cos(angle), 0.6 * np.sin(angle), 1.5)
    motion[:3, :3] = motion[:3, :3] @ LOOK @ rotation_x(0.01)
    return motion


def write_mini(folder: Path) -> Path:
    """Two scenes of two keyframes each; before a keyframe four sweeps, the first scene's none."""
    tables = Tables(folder)
    tables.sensor("LIDAR_TOP", LIDAR, [])
    (folder / "samples").mkdir()
    (folder / "sweeps").mkdir()
    for name, angle in MOUNTS.items():
        tables.sensor(name, camera_mount(angle), [[60.0, 0, 31], [0, 61, 17.5], [0, 0, 1]])
    for category in ("vehicle.car", "human.pedestrian.adult", "static_object.bicycle_rack"):
        tables.add("category", category, name=category, description="")
    for scene, start in (("scene-0061", 10.0), ("scene-0103", 30.0)):
        samples = [f"{scene}-{number}" for number in range(2)]
        previous = ""
        for number, sample in enumerate(samples):
            now = start + 0.25 * number
            tables.add(
                "sample",
                sample,
                timestamp=round(now * 1e6),
                scene_token=scene,
                prev=samples[0] if number else "",
                next="" if number else samples[1],
            )
            for back in range(4 if number else 0, -1, -1):
                time = now - STEP * back
                to_lidar = np.linalg.inv(ego_at(time) @ LIDAR)
                seen = PILLARS @ to_lidar[:3, :3].T + to_lidar[:3, 3]
                # One point of the car's own roof, which is left out of earlier sweeps.
                rows = np.c_[np.r_[seen, [[0.5, -0.9, -0.2]]], np.full(61, 17), np.arange(61) % 32]
                name = f"{'sweeps' if back else 'samples'}/lidar_{time:.2f}.pcd.bin"
                rows.astype("<f4").tofile(folder / name)
                previous = tables.data(
                    "LIDAR_TOP",
                    sample,
                    round(time * 1e6),
                    ego_at(time),
                    name,
                    key=back == 0,
                    prev=previous,
                )
            for k, channel in enumerate(CAMERA_NAMES):
                time = now - 0.01 * k
                name = f"samples/{channel}_{time:.2f}.jpg"
                Image.new("RGB", (64, 36), (40 * k, 0, 0)).save(folder / name)
                moment = (round(time * 1e6), ego_at(time), name)
                tables.data(channel, sample, *moment, key=True, size=(64, 36))
        for k, (category, level) in enumerate(
            [
                ("vehicle.car", "4"),
                ("human.pedestrian.adult", "1"),
                ("static_object.bicycle_rack", ""),
            ]
        ):
            instance = tables.add("instance", f"{scene}/{k}", category_token=category)
            for number, sample in enumerate(samples):
                tables.pose(
                    "sample_annotation",
                    f"{instance}/{number}",
                    about_z(0.3 * k, 12.0 + 0.5 * number * k, 5.0 * k, 1.0),
                    sample_token=sample,
                    instance_token=instance,
                    visibility_token=level,
                    attribute_tokens=[],
                    size=[1.9, 4.5 - k, 1.6],
                    prev=f"{instance}/0" if number else "",
                    next="" if number else f"{instance}/1",
                    num_lidar_pts=7 + k,
                    num_radar_pts=0,
                )
        tables.add(
            "scene",
            scene,
            log_token="log",
            nbr_samples=2,
            first_sample_token=samples[0],
            last_sample_token=samples[1],
            name=scene,
            description="",
        )
    return tables.write()
