"""From voxel features to a dense grid, in integers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bevquant_int8sim._backends import compiled_module
from bevquant_int8sim._grid_axes import check_outputs, per_axis
from bevquant_int8sim._scales import check_integer_tensor
from bevquant_sparse.runtime.eager import eager


@eager
def int8_to_dense(
    features: Tensor,
    indices: Tensor,
    spatial_shape: Sequence[int],
    batch_size: int,
    *,
    name: str = "int8_to_dense",
) -> Tensor:
    """Scatter integer voxel features into a grid of zeros.

    ``dense[indices[i, 0], :, *indices[i, 1:]] = features[i]``, as ``bevquant_sparse.to_dense``.
    Memory runs over batch, all axes but the last, channels, last axis: folding a height that comes
    last into the channels is then a view, with its channels last, as a dense convolution reads it.

    Args:
        features: int8, int16 or int32 ``[rows, channels]``.
        indices: int32 (or int64) ``[rows, 1 + axes]``, every row another voxel.
        spatial_shape: Voxels per axis.
        batch_size: Number of samples.
        name: The layer that a message names.

    Returns:
        ``[batch_size, channels, *spatial_shape]`` of the features' type.

    Raises:
        TypeError: `features` or `indices` are no integers.
        ValueError: A coordinate lies outside of the grid, or shapes disagree.

    Example:
        >>> q = torch.tensor([[7, -7]], dtype=torch.int8)
        >>> dense = int8_to_dense(q, torch.tensor([[0, 1, 2]]), (3, 4), 1)
        >>> tuple(dense.shape), dense[0, :, 1, 2].tolist()
        ((1, 2, 3, 4), [7, -7])
    """
    check_integer_tensor(name, "features", features, (torch.int8, torch.int16, torch.int32))
    check_integer_tensor(name, "indices", indices, (torch.int32, torch.int64))
    try:
        shape = tuple(spatial_shape)
    except TypeError as error:
        raise TypeError(f"{name}: spatial_shape={spatial_shape!r}: expected integers") from error
    if features.dim() != 2 or not shape or indices.shape != (len(features), 1 + len(shape)):
        raise ValueError(
            f"{name}: features {tuple(features.shape)} and indices {tuple(indices.shape)} "
            f"do not fit a grid of {len(shape)} axes: expected [rows, channels] and "
            f"[rows, {1 + len(shape)}]"
        )
    shape = per_axis(shape, len(shape), f"{name}: spatial_shape", 0)
    (batch_size,) = per_axis(batch_size, 1, f"{name}: batch_size", 0)
    check_outputs((batch_size, *shape), name)
    sizes = torch.tensor((batch_size, *shape), device=indices.device)
    outside = ((indices < 0) | (indices >= sizes)).any(1)
    if bool(outside.any()):
        row = int(outside.nonzero()[0, 0])
        raise ValueError(
            f"{name}: row {row} lies at {indices[row].tolist()}, outside of batch size and "
            f"grid {(batch_size, *shape)}"
        )
    made = (batch_size, *shape[:-1], features.shape[1], shape[-1])
    fits = features.dtype == torch.int8 and indices.dtype == torch.int32 and len(shape) == 3
    fits = fits and features.device.type == "cpu" and len(features) > 0
    kernels = compiled_module("channels_last", math.prod(made)) if fits else None
    if kernels is not None:
        grid: Tensor = kernels.scatter(features, indices, shape, batch_size)
    else:
        grid = features.new_zeros(made)
        grid.movedim(-2, -1)[indices.long().unbind(1)] = features
    return grid.movedim(-2, 1)
