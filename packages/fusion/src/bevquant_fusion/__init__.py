"""Fold batch normalisation into dense and sparse convolutions, found by data flow."""

from ._fuse_model import fuse_model, fuse_parts
from ._fuse_pair import fuse_conv_bn, fuse_sparse_conv_bn
from ._remove_bn import norm_as_convolution, norms_to_convolutions
from ._result import Fused, FusionResult, Skipped
from ._weights import fuse_conv_bn_weights, fuse_linear_bn_weights, fuse_sparse_conv_bn_weights

__version__ = "0.2.0"
__all__ = [
    "Fused",
    "FusionResult",
    "Skipped",
    "fuse_conv_bn",
    "fuse_conv_bn_weights",
    "fuse_linear_bn_weights",
    "fuse_model",
    "fuse_parts",
    "fuse_sparse_conv_bn",
    "fuse_sparse_conv_bn_weights",
    "norm_as_convolution",
    "norms_to_convolutions",
]
