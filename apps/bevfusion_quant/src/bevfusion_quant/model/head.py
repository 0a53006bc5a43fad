"""Alias of `bevfusion.model.head`."""

from bevfusion.model.head import *  # noqa: F403
from bevfusion.model.head import __all__ as __all__
