"""`bevfusion.pictures` under the name that it had here."""

from bevfusion.pictures import *  # noqa: F403
from bevfusion.pictures import __all__ as __all__
