"""`bev_data.datasets` under the name that it had here, kinds of other packages among them."""

from bev_data.datasets import (
    FrameList,
    dataset_cameras,
    dataset_kinds,
    find_dataset,
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
    "dataset_cameras",
    "dataset_kinds",
    "find_dataset",
    "labelled_region",
    "open_dataset",
    "range_origin",
    "scene_name",
    "write_frame_folder",
]
