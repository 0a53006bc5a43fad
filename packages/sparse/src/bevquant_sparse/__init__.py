"""Sparse convolution on CPU and CUDA: weight layouts, rulebooks, differentiable kernels."""

from bevquant_sparse._conv import sparse_conv
from bevquant_sparse._dense import to_dense
from bevquant_sparse._kernels import use_bevquant_kernels
from bevquant_sparse._layout import WeightLayout, permute_weight
from bevquant_sparse._modules import (
    get_weight,
    is_sparse_conv,
    layout_of,
    library_name,
    register_layout,
    set_weight,
)
from bevquant_sparse._pool import sparse_avg_pool, sparse_max_pool
from bevquant_sparse._rulebook import Rulebook, build_rulebook
from bevquant_sparse._shared_keys import adopt_kernels, borrowed_kernels
from bevquant_sparse._sparse_tensor import open_shapes, register_sparse_tensor
from bevquant_sparse._spconv import conv_forward
from bevquant_sparse._use_standin import use_standin

__version__ = "0.2.0"
__all__ = [
    "Rulebook",
    "WeightLayout",
    "adopt_kernels",
    "borrowed_kernels",
    "build_rulebook",
    "conv_forward",
    "get_weight",
    "is_sparse_conv",
    "layout_of",
    "library_name",
    "open_shapes",
    "permute_weight",
    "register_layout",
    "register_sparse_tensor",
    "set_weight",
    "sparse_avg_pool",
    "sparse_conv",
    "sparse_max_pool",
    "to_dense",
    "use_bevquant_kernels",
    "use_standin",
]
