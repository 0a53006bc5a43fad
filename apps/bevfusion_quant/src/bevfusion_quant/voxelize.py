"""`bev_data.voxelize` under the name that it had here."""

from bev_data.voxelize import *  # noqa: F403
from bev_data.voxelize import __all__ as __all__
