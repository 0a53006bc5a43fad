"""`bev_data.cameras` under the name that it had here."""

from bev_data.cameras import *  # noqa: F403
from bev_data.cameras import __all__ as __all__
