"""`bev_data.datasets` under the name that it had here, with the procedural streets."""

from typing import Literal

from bev_data.datasets import (
    FrameList,
    labelled_region,
    open_dataset,
    range_origin,
    register_dataset,
    scene_name,
    write_frame_folder,
)
from bevfusion_quant.scenes import open_streets

__all__ = [
    "DatasetKind",
    "FrameList",
    "labelled_region",
    "open_dataset",
    "range_origin",
    "register_dataset",
    "scene_name",
    "write_frame_folder",
]

DatasetKind = Literal["street", "pandaset", "kitti", "files", "nuscenes"]
register_dataset("street", open_streets)
