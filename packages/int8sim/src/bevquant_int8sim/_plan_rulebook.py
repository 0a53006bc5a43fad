"""Rulebooks for the integer kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bevquant_sparse import Rulebook, build_rulebook


def plan_rulebook(
    indices: Tensor, spatial_shape: Sequence[int], kernel_size: int | Sequence[int], *args: Any,
    **settings: Any,
) -> Rulebook:  # fmt: skip
    """`bevquant_sparse.build_rulebook` with ``tiles=True``, as the kernels here walk it.

    All arguments are as there.

    Example:
        >>> import torch
        >>> indices = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 5, 5, 5]], dtype=torch.int32)
        >>> plan_rulebook(indices, (8, 8, 8), 3, subm=True, batch_size=1).num_pairs
        5
    """
    return build_rulebook(indices, spatial_shape, kernel_size, *args, **settings, tiles=True)
