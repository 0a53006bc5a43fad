"""Fold batch normalisation into dense and sparse convolutions, found by data flow."""

from ._fuse_model import Fused, FusionResult, fuse_model
from ._fuse_pair import fuse_conv_bn, fuse_sparse_conv_bn
from ._plan import Skipped
from ._symbolic import (
    Call,
    DataFlow,
    UntraceableError,
    rebuild_forward,
    trace_dataflow,
    trace_forward,
)
from ._weights import fuse_conv_bn_weights, fuse_linear_bn_weights, fuse_sparse_conv_bn_weights

__all__ = [
    "Call",
    "DataFlow",
    "Fused",
    "FusionResult",
    "Skipped",
    "UntraceableError",
    "fuse_conv_bn",
    "fuse_conv_bn_weights",
    "fuse_linear_bn_weights",
    "fuse_model",
    "fuse_sparse_conv_bn",
    "fuse_sparse_conv_bn_weights",
    "rebuild_forward",
    "trace_dataflow",
    "trace_forward",
]
