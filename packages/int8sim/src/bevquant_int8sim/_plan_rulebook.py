"""Rulebooks for the integer kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bevquant_sparse import Rulebook, build_rulebook


def plan_rulebook(
    indices: Tensor,
    spatial_shape: Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    *,
    subm: bool,
    transposed: bool = False,
    output_padding: int | Sequence[int] = 0,
    batch_size: int | None = None,
) -> Rulebook:
    """``bevquant_sparse.build_rulebook``, several times as fast where the integer kernels need it.

    The result is the same set of pairs in the same order. Grids of three axes whose last one has
    at most 64 voxels, kernels of at most 32 elements without dilation along the last axis, int32
    coordinates on a CPU: these are planned from pillars. Everything else, bad input too, goes to
    ``build_rulebook``.

    Args:
        indices: As there, and so are all others.
        spatial_shape: Voxels per axis.
        kernel_size: One integer or one per axis, as all that follow.
        stride: Voxels.
        padding: Voxels; ignored for SubM.
        dilation: Voxels between kernel elements.
        subm: Submanifold convolution.
        transposed: Transposed convolution.
        output_padding: Transposed convolutions only.
        batch_size: ``None`` takes the largest batch index plus one.

    Example:
        >>> import torch
        >>> indices = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 5, 5, 5]], dtype=torch.int32)
        >>> plan_rulebook(indices, (8, 8, 8), 3, subm=True, batch_size=1).num_pairs
        5
    """
    arguments: dict[str, Any] = dict(
        spatial_shape=spatial_shape, kernel_size=kernel_size, stride=stride,
        padding=padding, dilation=dilation, subm=subm, transposed=transposed,
        output_padding=output_padding, batch_size=batch_size,
    )  # fmt: skip
    made = None if transposed else _planned(indices, arguments)
    return build_rulebook(indices, **arguments) if made is None else made


def _planned(indices: Tensor, arguments: dict[str, Any]) -> Rulebook | None:
    try:
        from bevquant_int8sim._compiled.planned_rulebook import planned_rulebook
    except ImportError:  # without numba
        return None
    return planned_rulebook(indices, arguments) if isinstance(indices, Tensor) else None
