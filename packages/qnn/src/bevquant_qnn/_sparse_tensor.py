"""Sparse tensors by their attributes, so that spconv is never imported here.

A sparse tensor has `features` [voxels, channels], `indices`, `spatial_shape` and `batch_size`;
spconv 2 adds `replace_feature`, spconv 1 does not.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bevquant_graph import is_sparse_tensor


def features_of(value: Any) -> Any:
    """Return the features of a sparse tensor, and anything else as it came."""
    return value.features if is_sparse_tensor(value) else value


def with_features(value: Any, features: Tensor) -> Any:
    """Return a new sparse tensor like `value` with other features; `value` is left alone."""
    if hasattr(value, "replace_feature"):
        return value.replace_feature(features)
    copy = type(value)(features, value.indices, value.spatial_shape, value.batch_size)
    if hasattr(value, "indice_dict"):
        copy.indice_dict = value.indice_dict
    return copy
