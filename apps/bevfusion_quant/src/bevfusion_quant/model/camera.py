"""`bevfusion.model.camera` under the name that it had here."""

from bevfusion.model.camera import *  # noqa: F403
from bevfusion.model.camera import __all__ as __all__
