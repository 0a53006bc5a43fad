"""`bevquant_quantizers.ranks` under the name that it had here."""

from bevquant_quantizers.ranks import *  # noqa: F403
from bevquant_quantizers.ranks import __all__ as __all__
