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
    shapes = [[*x.spatial_shape, x.batch_size, x.features.shape[1]] for x in tens]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            "sparse_add: expected one grid, batch size and number of channels, got "
            + " and ".join(map(str, shapes))
        )
    indices, total = first.indices, first.features
    # Two tensors at a time: a voxel has at most two rows, whose sum has one order, on CUDA too.
    for x in tens[1:]:
        rows = torch.cat([total, x.features])
        places = torch.cat([indices, x.indices])
        indices, row = torch.unique(places, dim=0, return_inverse=True)
        total = rows.new_zeros(indices.shape[0], rows.shape[1]).index_add(0, row, rows)
    return SparseConvTensor(
        total, indices, first.spatial_shape, first.batch_size, benchmark=first.benchmark
    )


sparse_add_hash_based = sparse_add  # another algorithm of spconv's for the same sum
globals().update(refused(__name__))
