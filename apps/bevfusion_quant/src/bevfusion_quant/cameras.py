"""Alias of `bev_data.cameras`."""

from bev_data.cameras import *  # noqa: F403
from bev_data.cameras import __all__ as __all__
