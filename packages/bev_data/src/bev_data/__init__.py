"""Driving data for 3D detection: frames in, voxels and calibrated pictures out, metrics of boxes.

`bev_data.points` and `.cameras` define a frame. `.datasets` opens PandaSet, KITTI, nuScenes and
your own files in one form. `.voxelize` makes voxels. `.boxes` holds detections and their overlap.
`.metrics` computes nuScenes' and KITTI's figures with bootstrap intervals. `.tables` is the form of
printed and drawn results.
"""

from bev_data._errors import InputError

__version__ = "0.2.0"
__all__ = ["InputError"]
