"""Rulebooks for the integer kernels."""

from __future__ import annotations

from collections.abc import Sequence

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
    backend: str = "auto",
) -> Rulebook:
    """`bevquant_sparse.build_rulebook` with ``tiles=True``, as the kernels here walk it.

    All arguments are as there.

    Example:
        >>> import torch
        >>> indices = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 5, 5, 5]], dtype=torch.int32)
        >>> plan_rulebook(indices, (8, 8, 8), 3, subm=True, batch_size=1).num_pairs
        5
    """
    return build_rulebook(
        indices, spatial_shape, kernel_size, stride, padding, dilation, subm=subm,
        transposed=transposed, output_padding=output_padding, batch_size=batch_size,
        backend=backend, tiles=True,
    )  # fmt: skip
