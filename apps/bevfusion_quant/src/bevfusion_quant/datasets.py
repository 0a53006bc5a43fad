"""`bev_data.datasets` under the name that it had here, with the procedural streets."""

from typing import Literal

import bev_scenes  # noqa: F401  registers the kind "street"
from bev_data.datasets import (
    FrameList,
    labelled_region,
    open_dataset,
    range_origin,
    scene_name,
    write_frame_folder,
)

__all__ = [
    "DatasetKind",
    "FrameList",
    "labelled_region",
    "open_dataset",
    "range_origin",
    "scene_name",
    "write_frame_folder",
]

DatasetKind = Literal["street", "pandaset", "kitti", "files", "nuscenes"]
