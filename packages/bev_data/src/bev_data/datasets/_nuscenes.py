"""nuScenes through its devkit: which samples there are."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from bev_data._errors import InputError
from bev_data.datasets._frame_list import FrameList
from bev_data.datasets._nuscenes_sample import read_sample
from bev_data.points import Frame

__all__ = ["nuscenes"]


def nuscenes(
    path: Path,
    *,
    version: str = "v1.0-mini",
    split: str | None = None,
    scenes: Sequence[str] | None = None,
    sweeps: int = 10,
    cameras: Literal["all", "none"] = "all",
) -> FrameList:
    """Keyframes of nuScenes with ten sweeps, six cameras and labels in the scanner's frame.

    Needs nuscenes-devkit (`pip install 'bev-data[nuscenes]'`). As in mit-bevfusion: each
    earlier sweep goes through global coordinates into the keyframe's, without its points within
    1 m of the scanner in x and in y, with its lag as the fifth column; a camera's pose is that of
    its own exposure. Unlike there, a scene's first keyframes have fewer sweeps instead of copies.
    Boxes carry nuScenes' ten class names where they have one, velocities (NaN where nuScenes does
    not know), and the middle of their visibility level (0.2, 0.5, 0.7, 0.9).

    Args:
        path: the folder with `samples`, `sweeps` and the tables' folder.
        version: the tables' folder, such as "v1.0-trainval".
        split: of the devkit ("mini_val", "val", …) or of a `splits.json` beside the tables.
        scenes: names of scenes; with a split, those that are in both.
        sweeps: how many at most, the keyframe's own among them.
        cameras: "all" or "none".

    Raises:
        InputError: no devkit, no such folder, version, split or scene, damaged tables, and at
            access a missing file or camera.
    """
    if sweeps < 1:
        raise InputError(f"sweeps={sweeps}: at least 1, the keyframe itself")
    if cameras not in ("all", "none"):
        raise InputError(f"cameras={cameras!r}: expected 'all' or 'none'")
    tables = _tables(path, version)
    wanted = _scenes(tables, split, scenes)
    keys = []
    for scene in wanted:
        token, number = scene["first_sample_token"], 0
        while token:
            keys.append((f"{scene['name']}_{number:02d}", token))
            token, number = tables.get("sample", token)["next"], number + 1
    if not keys:
        raise InputError(f"{path}: {version} holds no samples of the scenes asked for")

    def read(key: tuple[str, str]) -> Frame:
        return read_sample(tables, *key, sweeps=sweeps, with_cameras=cameras == "all")

    return FrameList("nuscenes", tuple(keys), read)


def _tables(path: Path, version: str) -> Any:
    try:
        devkit = importlib.import_module("nuscenes.nuscenes")
    except ImportError as error:
        raise InputError(
            f"nuScenes is read with nuscenes-devkit, which cannot be imported ({error}): install "
            "it with `pip install 'bev-data[nuscenes]'`"
        ) from error
    if not (path / version).is_dir():
        there = sorted(folder.name for folder in path.glob("v*") if folder.is_dir())
        raise InputError(
            f"{path / version}: no such folder of tables; {path} has {', '.join(there) or 'none'}"
        )
    try:
        return devkit.NuScenes(version=version, dataroot=str(path), verbose=False)
    except (AssertionError, OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{path / version}: the devkit cannot read the tables "
            f"({type(error).__name__}: {error}); unpack the data set's metadata and maps again"
        ) from error


def _scenes(tables: Any, split: str | None, names: Sequence[str] | None) -> list[dict[str, Any]]:
    there = {scene["name"]: scene for scene in tables.scene}
    missing = [name for name in names or () if name not in there]
    if missing:
        raise InputError(
            f"no scene {', '.join(missing)}; {tables.version} has {len(there)}, such as "
            f"{', '.join(sorted(there)[:5])}"
        )
    chosen = list(there) if names is None else list(names)
    if split is not None:
        inside = _split(tables, split)
        chosen = [name for name in chosen if name in inside]
        if not chosen:
            raise InputError(
                f"split {split!r} has none of the scenes of {tables.version}: another version "
                "may be meant (mini_train and mini_val are v1.0-mini's)"
            )
    return [there[name] for name in chosen]


def _split(tables: Any, split: str) -> set[str]:
    splits = importlib.import_module("nuscenes.utils.splits")
    known: dict[str, list[str]] = splits.create_splits_scenes()
    if split in known:
        return set(known[split])
    try:
        return set(splits.get_scenes_of_custom_split(split, tables))
    except (AttributeError, AssertionError, OSError, ValueError) as error:
        raise InputError(
            f"no split {split!r} ({error}); the devkit knows {', '.join(known)}"
        ) from error
