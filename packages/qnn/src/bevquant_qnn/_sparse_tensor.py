"""Sparse tensors by what they offer, so that spconv is never imported here.

A sparse tensor has `features` [voxels, channels], `indices`, `spatial_shape` and `batch_size`;
spconv 2 adds `replace_feature`, spconv 1 does not.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["features_of", "is_sparse_tensor", "with_features"]


def is_sparse_tensor(value: object) -> bool:
    """Tell whether `value` is an spconv-style sparse tensor."""
    return not isinstance(value, Tensor) and all(
        hasattr(value, name) for name in ("features", "indices", "spatial_shape", "batch_size")
    )


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
