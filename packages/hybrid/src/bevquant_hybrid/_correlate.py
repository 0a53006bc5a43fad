"""Patches of one feature map compared with those around the same place in another."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.jit._trace import TracerWarning

from bevquant_hybrid._torch_operator import operator

__all__ = ["correlate", "correlate_integers", "correlated_places", "plain_sizes"]


def plain_sizes(x: Tensor) -> tuple[int, ...]:
    """The shape as numbers; a model that torch.jit traces takes those that it was traced with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)
        return tuple(int(size) for size in x.shape)


def correlated_places(
    size: int, kernel_size: int, max_displacement: int, stride1: int, pad_size: int
) -> int:
    """Places along an axis: ⌈(size + 2·pad − 2·(max_displacement + (kernel − 1)/2)) / stride1⌉."""
    border = max_displacement + kernel_size // 2
    return -(-(size + 2 * pad_size - 2 * border) // stride1)


def correlate(
    x: Tensor,
    y: Tensor,
    kernel_size: int,
    max_displacement: int,
    stride1: int,
    stride2: int,
    pad_size: int,
) -> Tensor:
    r"""Sums of products of patches, not yet divided by their size.

    :math:`c_{n,q,i,j} = \sum_{c,o} x_{n,c}(p_{ij} + o)\, y_{n,c}(p_{ij} + s_2 q + o)`

    as `Correlation` explains.

    Args:
        x: ``[N, C, H, W]``, float or integers of 8 or 16 bits.
        y: The same.
        kernel_size: Side of a patch, odd.
        max_displacement: How far y is looked at around each place, in pixels.
        stride1: Pixels from place to place.
        stride2: Pixels from displacement to displacement.
        pad_size: Zeros around both maps.

    Returns:
        ``[N, D², H', W']`` with D = 2·⌊max_displacement/stride2⌋ + 1; int64 of integers, exact.

    Raises:
        ValueError: The maps are too small for one place.
    """
    height, width = plain_sizes(x)[2:]
    rows, columns = (
        correlated_places(size, kernel_size, max_displacement, stride1, pad_size)
        for size in (height, width)
    )
    if rows < 1 or columns < 1:
        raise ValueError(
            f"Correlation: maps of {height} × {width} leave no place with kernel_size="
            f"{kernel_size}, max_displacement={max_displacement} and pad_size={pad_size}; give "
            "larger maps or a larger pad_size"
        )
    exact = not x.is_floating_point()
    if exact:  # the product of two 16-bit integers fits 32 bits
        x, y = x.to(torch.int32), y.to(torch.int32)
    x, y = (F.pad(values, (pad_size,) * 4) for values in (x, y))
    # What the patches of all places cover: theirs in x, and as much, displaced, in y.
    down, across = (rows - 1) * stride1 + 1, (columns - 1) * stride1 + 1
    high, wide = down + kernel_size - 1, across + kernel_size - 1
    first = max_displacement
    still = x[:, :, first : first + high, first : first + wide]
    reach = max_displacement // stride2
    steps = [stride2 * q for q in range(-reach, reach + 1)]
    found = []
    for dy in steps:
        for dx in steps:
            top, left = first + dy, first + dx
            moved = y[:, :, top : top + high, left : left + wide]
            products = still * moved
            each = products.sum(1, dtype=torch.int64) if exact else products.sum(1)
            total = torch.zeros_like(each[:, :down:stride1, :across:stride1])
            for a in range(kernel_size):
                for b in range(kernel_size):
                    total = total + each[:, a : a + down : stride1, b : b + across : stride1]
            found.append(total)
    return torch.stack(found, 1)


@operator(
    "(Tensor x, Tensor y, int kernel_size, int max_displacement, int stride1, int stride2, "
    "int pad_size) -> Tensor"
)
def correlate_integers(
    x: Tensor,
    y: Tensor,
    kernel_size: int,
    max_displacement: int,
    stride1: int,
    stride2: int,
    pad_size: int,
) -> Tensor:
    """`correlate` of integers, exact in int64."""
    return correlate(x, y, kernel_size, max_displacement, stride1, stride2, pad_size)
