"""`bevfusion.model` under the name that it had here."""

from bevfusion.model import *  # noqa: F403
from bevfusion.model import __all__ as __all__
