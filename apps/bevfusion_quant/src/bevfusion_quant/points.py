"""`bev_data.points` under the name that it had here."""

from bev_data.points import *  # noqa: F403
from bev_data.points import __all__ as __all__
