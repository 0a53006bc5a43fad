"""Sparse convolution on CPU and CUDA: weight layouts, rulebooks, differentiable kernels."""

from bevquant_sparse._layout import WeightLayout, permute_weight
from bevquant_sparse._modules import (
    get_weight,
    is_sparse_conv,
    layout_of,
    register_layout,
    set_weight,
)
from bevquant_sparse._rulebook import Rulebook, build_rulebook

__all__ = [
    "Rulebook",
    "WeightLayout",
    "build_rulebook",
    "get_weight",
    "is_sparse_conv",
    "layout_of",
    "permute_weight",
    "register_layout",
    "set_weight",
]
