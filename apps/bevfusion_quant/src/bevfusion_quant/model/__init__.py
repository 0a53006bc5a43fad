"""Alias of `bevfusion.model`."""

from bevfusion.model import *  # noqa: F403
from bevfusion.model import __all__ as __all__
