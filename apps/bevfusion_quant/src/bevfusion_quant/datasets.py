"""`bev_data.datasets` under the name that it had here, with the procedural streets."""

import bev_scenes  # noqa: F401  registers the kind "street"
from bev_data.datasets import (
    FrameList,
    labelled_region,
    open_dataset,
    range_origin,
    scene_name,
    write_frame_folder,
)
from bevfusion_quant.options import DatasetKind

__all__ = [
    "DatasetKind",
    "FrameList",
    "labelled_region",
    "open_dataset",
    "range_origin",
    "scene_name",
    "write_frame_folder",
]
