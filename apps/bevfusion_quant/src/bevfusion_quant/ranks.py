"""Alias of `bevquant_quantizers.ranks`."""

from bevquant_quantizers.ranks import *  # noqa: F403
from bevquant_quantizers.ranks import __all__ as __all__
