"""`spconv.pytorch.functional`: sums over the union of voxels."""

from __future__ import annotations

import torch

from bevquant_sparse._standin._refused import refused
from bevquant_sparse._standin._tensor import SparseConvTensor

__name__ = "spconv.pytorch.functional"


def sparse_add(*tens: SparseConvTensor) -> SparseConvTensor:
    """Sum of sparse tensors over the union of their voxels, in ascending order of the voxels.

    Raises:
        ValueError: The grids, batch sizes or channels differ.
    """
    first = tens[0]
    shapes = {(*x.spatial_shape, x.batch_size, x.features.shape[1]) for x in tens}
    if len(shapes) != 1:
        raise ValueError(
            "sparse_add: expected one grid, batch size and number of channels, got "
            + " and ".join(str(list(shape)) for shape in sorted(shapes))
        )
    rows = torch.cat([x.indices for x in tens])
    indices, places = torch.unique(rows, dim=0, return_inverse=True)
    total = first.features.new_zeros(indices.shape[0], first.features.shape[1])
    # Rows of one tensor are distinct, so each addition has one order, on CUDA too.
    for x, at in zip(tens, places.split([len(x.indices) for x in tens]), strict=True):
        total = total.index_add(0, at, x.features)
    return SparseConvTensor(
        total, indices, first.spatial_shape, first.batch_size, benchmark=first.benchmark
    )


sparse_add_hash_based = sparse_add  # another algorithm of spconv's for the same sum
globals().update(refused(__name__))
