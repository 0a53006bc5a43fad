"""Correlation of two maps."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from bevquant_hybrid._integer_ops import operator
from bevquant_hybrid.nn._functions import showing


def plain_sizes(x: Tensor) -> tuple[int, ...]:
    """The shape as integers; under torch.jit.trace they become constants."""
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
    """Sums of products of patches, as in `Correlation`, but not divided by their size."""
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
    # Of integers of 8 or 16 bits the sums are exact, in int64.
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


# Of integers, exact in int64.
correlate_integers = operator(correlate, "correlate_integers")


def channels_of(where: str, x: Tensor, y: Tensor) -> int:
    """The number of channels of two comparable maps."""
    first, second = plain_sizes(x), plain_sizes(y)
    if len(first) != 4 or first != second:
        raise ValueError(
            f"{where}: expected two maps [N, C, H, W] of the same shape, got {first} and {second}"
        )
    return first[1]


class Correlation(nn.Module):
    r"""Compare each patch of one feature map with those around it in another.

    .. math:: out_{n,q,i,j} = \frac{1}{K^2 C} \sum_{c} \sum_{o \in [0, K)^2}
              f_{1,n,c}(p_{ij} + o) \, f_{2,n,c}(p_{ij} + s_2 q + o)

    with K = `kernel_size`, :math:`p_{ij} = (i, j) \cdot s_1 + d` for d = `max_displacement`, both
    maps padded with `pad_size` zeros on every side, and q over :math:`[-\lfloor d/s_2 \rfloor,
    \lfloor d/s_2 \rfloor]^2`, row by row: channel :math:`(q_y + r) D + q_x + r` of :math:`D^2 = (2r
    + 1)^2` for :math:`r = \lfloor d/s_2 \rfloor`. (FlowNet: Dosovitskiy et al., 2015, equation 1;
    arguments, defaults, normalization and sizes as in MXNet's and FlowNet's operators of this
    name.) There are :math:`\lceil (H + 2 \cdot pad - 2 (d + (K - 1)/2)) / s_1 \rceil` rows of
    places, and columns alike.

    In QAT the result has its own scale. Converted, :math:`q_{out} = \operatorname{round}(acc \cdot
    s_1 s_2 / (K^2 C s_{out}))` of exact sums acc of integers, which must fit int32.

    Args:
        kernel_size: Side of a patch in pixels, odd.
        max_displacement: Largest displacement of a patch, in pixels.
        stride1: Pixels between places in the first map.
        stride2: Pixels between displacements in the second map.
        pad_size: Zeros around both maps, in pixels.
        is_multiply: True; differences instead of products are documented as not supported.

    Raises:
        ValueError: A setting does not fit; the message names it.

    Example:
        >>> import torch
        >>> x = torch.ones(1, 4, 5, 5)
        >>> Correlation(max_displacement=1, pad_size=1)(x, x)[0, :, 0, 0]  # at the upper left
        tensor([0., 0., 0., 0., 1., 1., 0., 1., 1.])
    """

    def __init__(
        self,
        kernel_size: int = 1,
        max_displacement: int = 1,
        stride1: int = 1,
        stride2: int = 1,
        pad_size: int = 0,
        is_multiply: bool = True,
    ) -> None:
        super().__init__()
        least = {"kernel_size": 1, "max_displacement": 0, "stride1": 1, "stride2": 1, "pad_size": 0}
        given = (kernel_size, max_displacement, stride1, stride2, pad_size)
        for (name, lowest), value in zip(least.items(), given, strict=True):
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise ValueError(
                    f"Correlation: {name}={value!r}: expected an integer from {lowest}"
                )
        if kernel_size % 2 == 0:
            raise ValueError(
                f"Correlation: kernel_size={kernel_size}: expected an odd number, so that a patch "
                "has a middle"
            )
        if not is_multiply:
            raise ValueError(
                "Correlation: is_multiply=False: a BPU multiplies patches and does not subtract "
                "them; leave it True"
            )
        self.kernel_size, self.max_displacement = kernel_size, max_displacement
        self.stride1, self.stride2, self.pad_size = stride1, stride2, pad_size
        self.is_multiply = is_multiply

    @property
    def window(self) -> tuple[int, int, int, int, int]:
        """Arguments of `correlate` after the maps."""
        sides = self.kernel_size, self.max_displacement
        return *sides, self.stride1, self.stride2, self.pad_size

    def forward(self, data1: Tensor, data2: Tensor) -> Tensor:
        """Compare.

        Args:
            data1: ``[N, C, H, W]``.
            data2: ``[N, C, H, W]``.

        Returns:
            ``[N, D², H', W']``.

        Raises:
            ValueError: Maps that do not fit.
        """
        channels = channels_of("Correlation", data1, data2)
        return correlate(data1, data2, *self.window) / (self.kernel_size**2 * channels)

    extra_repr = showing("kernel_size", "max_displacement", "stride1", "stride2", "pad_size")
