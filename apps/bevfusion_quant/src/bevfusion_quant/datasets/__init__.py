"""Data sets with one interface: procedural streets, PandaSet, KITTI, nuScenes, files of one's own.

nuScenes needs nuscenes-devkit (the extra `nuscenes`), whose metadata asks for numpy below 2; pip
then replaces numpy 2 by 1.26, with which everything here works too. To keep numpy 2, with which
the devkit's reader works as well, install it apart from its requirements:
`pip install --no-deps nuscenes-devkit descartes pyquaternion` and then
`pip install cachetools opencv-python-headless scikit-learn 'shapely<2.1' pycocotools`.
"""

from __future__ import annotations

from bevfusion_quant.datasets._frame_folder import write_frame_folder
from bevfusion_quant.datasets._frame_list import FrameList
from bevfusion_quant.datasets._labelled import labelled_region, range_origin, scene_name
from bevfusion_quant.datasets._open import DatasetKind, open_dataset

__all__ = [
    "DatasetKind",
    "FrameList",
    "labelled_region",
    "open_dataset",
    "range_origin",
    "scene_name",
    "write_frame_folder",
]
