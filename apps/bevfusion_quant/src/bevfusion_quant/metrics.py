"""`bev_data.metrics` under the name that it had here."""

from bev_data.metrics import *  # noqa: F403
from bev_data.metrics import __all__ as __all__
