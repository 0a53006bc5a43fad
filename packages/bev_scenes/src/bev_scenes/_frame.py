"""A street from a seed, scanned and, if asked for, photographed; streets as a data set."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bev_data import InputError
from bev_data.datasets import FrameList, open_dataset
from bev_data.points import Frame
from bev_scenes._conditions import CONDITIONS, Conditions
from bev_scenes._labels import scanner_pose
from bev_scenes._render import Picture, render_street
from bev_scenes._rig import RIGS, CameraRig
from bev_scenes._scan import SpinningLidar, scan_street
from bev_scenes._street import build_street

_T = TypeVar("_T")


@dataclass(frozen=True)
class SceneSettings:
    """How finely the LiDAR scans a street.

    Args:
        beams: lasers, evenly spaced from −30.67° to 10.67°.
        sweeps: turns, the newest at time lag 0, 0.05 s apart.
        azimuth_steps: firings per turn.
        max_range: [m].
    """

    beams: int = 32
    sweeps: int = 10
    azimuth_steps: int = 1084
    max_range: float = 70.0


SIZES: dict[str, SceneSettings] = {
    "nuscenes": SceneSettings(),
    # About one firing per 0.3 m voxel at 25 m.
    "tiny": SceneSettings(sweeps=3, azimuth_steps=512),
}


def street_frame(
    seed: int = 0,
    *,
    size: str | SceneSettings = "nuscenes",
    cameras: str | CameraRig | None = None,
    beams: int | None = None,
    sweeps: int | None = None,
    azimuth_steps: int | None = None,
    max_range: float | None = None,
    scan_seed: int | None = None,
    conditions: str | Conditions = "clear",
    threads: int | None = None,
) -> Frame:
    """A street seen by a spinning LiDAR and by cameras, ray-cast; needs no file and no download.

    The frame is that of nuScenes' scanner: x right, y forward, z up, the ground about 1.84 m
    below the origin. The same arguments give the same frame, bit for bit, with one numpy version
    (its generators decide the noise) and any number of threads.

    Args:
        seed: of the street: every seed is another street.
        size: of the scan, a key of `SIZES` or one's own: "nuscenes" has nuScenes' ten sweeps,
            "tiny" what suits the configuration `tiny`, its 0.3 m voxels and its seconds.
        cameras: a key of `RIGS` ("nuscenes", six images of 1600x900; "tiny", of 320x180) or one's
            own rig; no pictures where None.
        beams: instead of the size's.
        sweeps: instead of the size's.
        azimuth_steps: instead of the size's.
        max_range: instead of the size's [m].
        scan_seed: of noise and dropout; `seed` where None.
        conditions: weather, light and faults, a key of `CONDITIONS` or one's own.
        threads: that render pictures; one for each processor where None.

    Returns:
        A frame, named by seed and conditions, with points, with labels of the labelled objects that
        have returns (boxes, velocities, visibility, numbers of points), and with cameras.

    Raises:
        ValueError: numbers that make no street or no scanner, or an unknown name.

    Examples:
        >>> frame = street_frame(size="tiny", beams=8, sweeps=1, azimuth_steps=90, cameras="tiny")
        >>> frame.points.shape[1], [camera.name for camera in frame.cameras][:2]
        (5, ['CAM_FRONT', 'CAM_FRONT_RIGHT'])
        >>> set(frame.labels.names) <= {
        ...     "car", "truck", "construction_vehicle", "bus", "trailer", "barrier",
        ...     "traffic_cone", "pedestrian", "bicycle", "motorcycle"}
        True
    """
    if seed < 0:
        raise ValueError(f"seed={seed}: must not be negative")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads}: at least 1, or None for one per processor")
    settings = _named("size", size, SIZES) if isinstance(size, str) else size
    rig = _named("cameras", cameras, RIGS) if isinstance(cameras, str) else cameras
    name = f"street_{seed}"
    if isinstance(conditions, str):
        name += "" if conditions == "clear" else f"_{conditions}"
        conditions = _named("conditions", conditions, CONDITIONS)
    lidar = SpinningLidar(
        beams=(conditions.beams or settings.beams) if beams is None else beams,
        azimuth_steps=settings.azimuth_steps if azimuth_steps is None else azimuth_steps,
        max_range=settings.max_range if max_range is None else max_range,
    )
    sweeps = settings.sweeps if sweeps is None else sweeps
    street = build_street(seed, conditions.slopes)
    scan_seed = seed if scan_seed is None else scan_seed
    scan = scan_street(street, lidar, sweeps=sweeps, seed=scan_seed, conditions=conditions)
    pictures: tuple[Picture, ...] = ()
    if rig is not None:
        pose = scanner_pose(street, lidar.height)
        pictures = render_street(
            street, rig, pose, seed=seed, threads=threads, conditions=conditions
        )
    return Frame(
        name,
        scan.points,
        labels=scan.labels,
        cameras=tuple(picture.camera for picture in pictures),
    )


def stored_street() -> Frame:
    """`street_frame(0, size="tiny", cameras="tiny")`, bit for bit, read from this package.

    What renders streets is compiled when it is first called, which takes longer than all else that
    a small model is shown for. The folder is one as `bev_data.datasets.open_dataset("files", …)`
    reads and `write_frame_folder` writes.

    Examples:
        >>> frame = stored_street()
        >>> frame.name, len(frame.cameras)
        ('street_0', 6)
    """
    return open_dataset("files", Path(__file__).with_name("street_0"))[0]


def _named(what: str, name: str, known: dict[str, _T]) -> _T:
    if name not in known:
        raise ValueError(f"{what}={name!r}: unknown; expected one of {', '.join(known)}")
    return known[name]


def open_streets(
    path: None = None, *, count: int = 1, first_seed: int = 0, **options: Any
) -> FrameList:
    """Streets of consecutive seeds, rendered when asked for.

    Args:
        path: none; a street needs no file.
        count: how many.
        first_seed: of the first one.
        options: keyword arguments of `street_frame`, such as cameras="nuscenes".

    Raises:
        InputError: a path, no frames, a negative seed, or an option that `street_frame` lacks.
    """
    if path is not None:
        raise InputError(f"{path}: a street is made from a seed; leave the path out")
    if count < 1 or first_seed < 0:
        raise InputError(
            f"count={count}, first_seed={first_seed}: at least one street, and no negative seed"
        )
    known = [name for name in inspect.signature(street_frame).parameters if name != "seed"]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InputError(
            f"{', '.join(unknown)}: a street has count, first_seed, {', '.join(known)}"
        )

    given = options.get("conditions", "clear")
    if isinstance(given, str) and given not in CONDITIONS:
        raise InputError(f"conditions={given}: unknown; expected one of {', '.join(CONDITIONS)}")

    def read(seed: int) -> Frame:
        try:
            return street_frame(seed, **options)
        except ValueError as error:
            raise InputError(f"street {seed}: {error}") from error

    return FrameList("street", range(first_seed, first_seed + count), read)
