"""Data sets with one interface: PandaSet, KITTI, nuScenes, files of one's own.

nuScenes needs nuscenes-devkit (the extra `nuscenes`), whose metadata asks for numpy below 2; pip
then replaces numpy 2 by 1.26, with which everything here works too. To keep numpy 2, with which
the devkit's reader works as well, install it apart from its requirements:
`pip install --no-deps nuscenes-devkit descartes pyquaternion` and then
`pip install cachetools opencv-python-headless scikit-learn 'shapely<2.1' pycocotools`.
"""

from __future__ import annotations

from bev_data.datasets._frame_folder import write_frame_folder
from bev_data.datasets._frame_list import FrameList
from bev_data.datasets._names import NUSCENES_NAMES, detection_names
from bev_data.datasets._open import (
    dataset_cameras,
    dataset_kinds,
    find_dataset,
    labelled_region,
    open_dataset,
    range_origin,
    register_dataset,
    scene_name,
)

__all__ = [
    "NUSCENES_NAMES",
    "FrameList",
    "dataset_cameras",
    "dataset_kinds",
    "detection_names",
    "find_dataset",
    "labelled_region",
    "open_dataset",
    "range_origin",
    "register_dataset",
    "scene_name",
    "write_frame_folder",
]
