"""Alias of `bev_data.voxelize`."""

from bev_data.voxelize import *  # noqa: F403
from bev_data.voxelize import __all__ as __all__
