"""From voxel features to a dense grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bevquant_sparse._geometry import as_tuple, check_range, make_geometry, require_indices
from bevquant_sparse._operator import operator


def to_dense(
    features: Tensor, indices: Tensor, spatial_shape: Sequence[int], batch_size: int
) -> Tensor:
    """Scatter voxel features into a zero-filled dense grid, channels first.

    ``dense[indices[i, 0], :, *indices[i, 1:]] = features[i]``, as spconv's
    ``SparseConvTensor.dense()``. Differentiable in ``features``. Where two rows share a
    coordinate one of them wins.

    Args:
        features: ``[rows, channels]``.
        indices: int32 (or int64) ``[rows, 1 + ndim]``: batch, then the spatial axes.
        spatial_shape: Grid size in voxels per axis.
        batch_size: Number of samples.

    Returns:
        ``[batch_size, channels, *spatial_shape]``, the dtype and device of ``features``.

    Raises:
        ValueError: A coordinate lies outside the grid, or the shapes disagree.

    Example:
        >>> import torch
        >>> dense = to_dense(torch.ones(1, 2), torch.tensor([[0, 1, 2]]), (3, 4), batch_size=1)
        >>> tuple(dense.shape), float(dense[0, 1, 1, 2])
        ((1, 2, 3, 4), 1.0)
    """
    shape = as_tuple("spatial_shape", spatial_shape, None, minimum=1)
    rows = require_indices(indices, len(shape))
    if not isinstance(features, Tensor):
        raise TypeError(f"features: expected a torch.Tensor, got {type(features).__name__}")
    if features.ndim != 2 or features.shape[0] != rows.shape[0]:
        raise ValueError(
            f"features have shape {tuple(features.shape)}; expected [{rows.shape[0]}, channels]: "
            "one row per row of indices"
        )
    geometry = make_geometry(
        shape, 1, 1, 0, 1, 0, subm=True, transposed=False,
        batch_size=as_tuple("batch_size", (batch_size,), 1, minimum=0)[0],
    )  # fmt: skip
    out: Tensor = _to_dense(features, rows, list(geometry.in_shape), geometry.batch_size)
    return out


@operator(
    "to_dense(Tensor features, Tensor indices, SymInt[] spatial_shape, SymInt batch_size) -> Tensor"
)
def _to_dense(
    features: Tensor, indices: Tensor, spatial_shape: Sequence[int], batch_size: int
) -> Tensor:
    """``to_dense`` of operands that fit each other; the range of the indices is checked here."""
    geometry = make_geometry(
        spatial_shape, 1, 1, 0, 1, 0, subm=True, transposed=False, batch_size=batch_size
    )
    check_range(indices, geometry)
    sizes = (batch_size, *spatial_shape, features.shape[1])
    try:
        dense = features.new_zeros(sizes)
    except RuntimeError as error:
        raise ValueError(f"a dense grid {sizes} of {features.dtype} cannot be held") from error
    dense.index_put_(tuple(indices.long().unbind(1)), features)
    return dense.movedim(-1, 1).contiguous()


@_to_dense.register_fake
def _(features: Tensor, indices: Tensor, spatial_shape: Sequence[int], batch_size: int) -> Tensor:
    return features.new_empty(batch_size, features.shape[1], *spatial_shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    return grad_out.movedim(1, -1)[tuple(indices.long().unbind(1))], None, None, None


_to_dense.register_autograd(_backward, setup_context=_keep_for_backward)
