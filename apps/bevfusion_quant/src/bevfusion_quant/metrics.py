"""Alias of `bev_data.metrics`."""

from bev_data.metrics import *  # noqa: F403
from bev_data.metrics import __all__ as __all__
