"""Alias of `bev_data.points`."""

from bev_data.points import *  # noqa: F403
from bev_data.points import __all__ as __all__
