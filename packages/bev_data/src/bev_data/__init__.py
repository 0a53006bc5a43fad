"""Driving data for 3D detection: frames in, voxels and calibrated pictures out, metrics of boxes.

`bev_data.points` and `.cameras` hold what a frame is made of, `.datasets` opens PandaSet, KITTI,
nuScenes and files of one's own in one form, `.voxelize` makes voxels, `.boxes` holds detections and
their overlap, `.metrics` nuScenes' and KITTI's figures with bootstrap intervals, `.tables` the form
in which results are printed and drawn.
"""

from bev_data._errors import InputError

__version__ = "0.2.0"
__all__ = ["InputError"]
