"""Alias of `bevfusion.pictures`."""

from bevfusion.pictures import *  # noqa: F403
from bevfusion.pictures import __all__ as __all__
