"""`bevfusion.model.head` under the name that it had here."""

from bevfusion.model.head import *  # noqa: F403
from bevfusion.model.head import __all__ as __all__
