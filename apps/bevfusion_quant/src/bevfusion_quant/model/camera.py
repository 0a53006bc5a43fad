"""Alias of `bevfusion.model.camera`."""

from bevfusion.model.camera import *  # noqa: F403
from bevfusion.model.camera import __all__ as __all__
