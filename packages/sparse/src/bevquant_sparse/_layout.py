"""Weight layouts of sparse and dense convolutions, and the permutation between any two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

from torch import Tensor


class WeightLayout(Enum):
    """Axis order of a convolution weight; ``k1 … kn`` are the kernel axes, rank 1 to 4.

    ======== ============================ ===========================================
    member   shape                        used by
    ======== ============================ ===========================================
    ``RSCK`` ``[k1, …, kn, in, out]``     spconv 1.x, mmdet3d, mmcv, mit-bevfusion
    ``KRSC`` ``[out, k1, …, kn, in]``     spconv 2.x
    ``KCRS`` ``[out, in, k1, …, kn]``     torch ``Conv1d/2d/3d``
    ``VCK``  ``[k1·…·kn, in, out]``       torchsparse, MinkowskiEngine
    ======== ============================ ===========================================
    """

    RSCK = "RSCK"
    KRSC = "KRSC"
    KCRS = "KCRS"
    VCK = "VCK"

    def kernel_size(self, weight: Tensor) -> tuple[int, ...]:
        """Kernel extents that ``weight`` shows in this layout; ``VCK`` shows their product."""
        shape = tuple(weight.shape)
        if self is WeightLayout.KRSC:
            return shape[1:-1]
        if self is WeightLayout.KCRS:
            return shape[2:]
        return shape[:-2]

    def channels(self, weight: Tensor) -> tuple[int, int]:
        """``(in_channels, out_channels)`` of ``weight`` in this layout."""
        shape = weight.shape
        if self is WeightLayout.KRSC:
            return int(shape[-1]), int(shape[0])
        if self is WeightLayout.KCRS:
            return int(shape[1]), int(shape[0])
        return int(shape[-2]), int(shape[-1])

    @property
    def out_axis(self) -> int:
        """Axis of the output channels: 0 or −1."""
        return 0 if self in (WeightLayout.KRSC, WeightLayout.KCRS) else -1


def permute_weight(
    weight: Tensor,
    src: WeightLayout,
    dst: WeightLayout,
    *,
    kernel_size: Sequence[int] | None = None,
) -> Tensor:
    """Return ``weight`` rearranged from layout ``src`` to ``dst``.

    A permutation and reshape only: exact, differentiable, contiguous, and undone by exchanging
    ``src`` and ``dst``. Kernel offsets in ``VCK`` are numbered row-major over the kernel axes.

    Args:
        weight: Weight in layout ``src``.
        src: Layout of ``weight``.
        dst: Layout wanted.
        kernel_size: Kernel extent per axis. Needed only where ``src`` is ``VCK``, whose shape
            shows only their product; checked against ``weight`` otherwise.

    Returns:
        The weight in layout ``dst``.

    Raises:
        TypeError: ``weight`` is no tensor, or a layout none of ``WeightLayout``.
        ValueError: ``weight`` has a rank the layout cannot have, ``kernel_size`` disagrees with
            it, or ``kernel_size`` is missing for ``VCK``.

    Example:
        >>> import torch
        >>> w = torch.zeros(16, 3, 3, 3, 5)
        >>> tuple(permute_weight(w, WeightLayout.KRSC, WeightLayout.RSCK).shape)
        (3, 3, 3, 5, 16)
    """
    _check(weight, src, dst, kernel_size)
    if src is dst:
        return weight
    return _from_rsck(_to_rsck(weight, src, dst, kernel_size), dst)


def _check(
    weight: Tensor, src: WeightLayout, dst: WeightLayout, kernel_size: Sequence[int] | None
) -> None:
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight: expected a tensor, got {type(weight).__name__}")
    for what, layout in (("src", src), ("dst", dst)):
        if not isinstance(layout, WeightLayout):
            raise TypeError(f"{what}={layout!r}: expected a WeightLayout")
    ranks = (3, 3) if src is WeightLayout.VCK else (3, 6)
    if not ranks[0] <= weight.ndim <= ranks[1]:
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} cannot be {src.name}: expected "
            f"{'3' if ranks[0] == ranks[1] else '3 to 6'} axes (kernel rank 1 to 4)"
        )
    if kernel_size is None:
        return
    shown = src.kernel_size(weight)
    given = tuple(int(k) for k in kernel_size)
    agree = shown == given if src is not WeightLayout.VCK else shown[0] == math.prod(given)
    if not agree:
        raise ValueError(
            f"kernel_size={given} disagrees with the weight's shape {tuple(weight.shape)} in "
            f"layout {src.name}; pass the kernel size of this weight"
        )


def _to_rsck(
    weight: Tensor, src: WeightLayout, dst: WeightLayout, kernel_size: Sequence[int] | None
) -> Tensor:
    if src is WeightLayout.KRSC:
        return weight.movedim(0, -1)
    if src is WeightLayout.KCRS:
        return weight.movedim((1, 0), (-2, -1))
    if src is WeightLayout.VCK:
        if kernel_size is None:
            raise ValueError(
                f"permute_weight from VCK to {dst.name} needs kernel_size: the weight's shape "
                f"{tuple(weight.shape)} shows only the product of the kernel extents"
            )
        return weight.reshape(*(int(k) for k in kernel_size), *weight.shape[1:])
    return weight


def _from_rsck(weight: Tensor, dst: WeightLayout) -> Tensor:
    if dst is WeightLayout.KRSC:
        return weight.movedim(-1, 0).contiguous()
    if dst is WeightLayout.KCRS:
        return weight.movedim((-2, -1), (1, 0)).contiguous()
    if dst is WeightLayout.VCK:
        return weight.reshape(-1, *weight.shape[-2:]).contiguous()
    return weight.contiguous()
