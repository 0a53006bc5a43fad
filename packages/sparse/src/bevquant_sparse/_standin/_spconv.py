"""`spconv` itself: version and algorithms."""

from bevquant_sparse._standin._algorithms import AlgoHint, ConvAlgo

__name__ = "spconv"
__all__ = ["SPCONV_VERSION_NUMBERS", "STANDIN", "AlgoHint", "ConvAlgo"]

# The version whose interface this is: public models decide by it.
SPCONV_VERSION_NUMBERS = [2, 3, 8]
__version__ = ".".join(map(str, SPCONV_VERSION_NUMBERS))
STANDIN = "bevquant_sparse"  # tells it from an installed spconv, which has no such name
