"""Run an spconv-style pooling module through this package's kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bevquant_sparse._pool import sparse_avg_pool, sparse_max_pool
from bevquant_sparse._rulebook_cache import rulebook_for
from bevquant_sparse._spconv import with_rulebook


def pool_forward(module: Any, x: Any, kind: str) -> Any:
    """Max or average pooling over the voxels present in each window.

    Args:
        module: Has ``kernel_size, stride, padding, dilation, indice_key`` as spconv's
            ``SparseMaxPool``.
        x: Tensor like spconv's ``SparseConvTensor``.
        kind: ``"max"`` or ``"avg"``; the average divides by the number of voxels present.

    Returns:
        A tensor like ``x``; the rulebook is kept under ``indice_key``, so that an inverse
        convolution can undo the pooling.
    """
    rulebook, indice_dict = rulebook_for(module, x, "auto")
    pool = sparse_max_pool if kind == "max" else sparse_avg_pool
    return with_rulebook(x, pool(x.features, rulebook), rulebook, indice_dict)


def global_max_pool(features: Tensor, indices: Tensor, batch_size: int) -> Tensor:
    """Largest features of each frame, ``[batch_size, channels]``; zeros where it has no voxel."""
    frames = indices[:, :1].long().expand_as(features)
    start = features.new_zeros(batch_size, features.shape[1])
    return start.scatter_reduce(0, frames, features, "amax", include_self=False)
