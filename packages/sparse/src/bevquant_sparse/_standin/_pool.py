"""`spconv.pytorch.pool`: pooling over the active voxels of each window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bevquant_sparse._kernels import AvgPool, GlobalAvgPool, GlobalMaxPool, MaxPool
from bevquant_sparse._standin._algorithms import ConvAlgo
from bevquant_sparse._standin._sequential import SparseModule
from bevquant_sparse._standin._tensor import expand_nd

__name__ = "spconv.pytorch.pool"


class _Pool(SparseModule):
    """Settings that max and average pooling share."""

    default_algo = ConvAlgo.Native

    def __init__(
        self,
        ndim: int,
        kernel_size: Any = 3,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        indice_key: str | None = None,
        subm: bool = False,
        algo: ConvAlgo | None = None,
        record_voxel_count: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.ndim = ndim
        self.kernel_size = expand_nd(ndim, kernel_size)
        self.stride = self.kernel_size.copy() if stride is None else expand_nd(ndim, stride)
        self.padding = expand_nd(ndim, padding)
        self.subm = subm
        self.dilation = expand_nd(ndim, dilation)
        self.indice_key = indice_key
        self.algo = self.default_algo if algo is None else algo
        self.record_voxel_count = record_voxel_count
        if record_voxel_count:
            self.register_buffer(
                "max_num_voxels_during_training", torch.zeros(1, dtype=torch.int32)
            )

    def extra_repr(self) -> str:
        """The settings, as spconv shows them."""
        names = ("kernel_size", "stride", "padding", "dilation", "algo")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def get_max_num_voxels(self) -> Tensor | None:
        """The largest number of output voxels so far, where it is recorded."""
        return getattr(self, "max_num_voxels_during_training", None)


class SparseMaxPool(_Pool):
    """Maximum over the active voxels of each window."""

    forward = MaxPool.forward


class SparseAvgPool(_Pool):
    """Mean over the active voxels of each window."""

    default_algo = ConvAlgo.MaskImplicitGemm
    forward = AvgPool.forward


class SparseGlobalMaxOrAvgPool(SparseModule):
    """Maximum or mean over the voxels of each sample."""

    def __init__(self, is_mean: bool, name: str | None = None) -> None:
        super().__init__(name=name)
        self.is_mean = is_mean

    def forward(self, input: Any) -> Tensor:
        """``[batch_size, channels]``; zeros for a sample without voxels."""
        kernel: Any = GlobalAvgPool if self.is_mean else GlobalMaxPool
        out: Tensor = kernel.forward(self, input)
        return out


class SparseGlobalMaxPool(SparseGlobalMaxOrAvgPool):
    """Maximum over the voxels of each sample."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(is_mean=False, name=name)


class SparseGlobalAvgPool(SparseGlobalMaxOrAvgPool):
    """Mean over the voxels of each sample."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(is_mean=True, name=name)


def _ranked(kind: type[_Pool], ndim: int) -> Any:
    """The pooling of one number of axes: ``SparseMaxPool3d`` and the like."""

    class Ranked(kind):  # type: ignore[misc, valid-type]
        def __init__(
            self,
            kernel_size: Any,
            stride: Any = None,
            padding: Any = 0,
            dilation: Any = 1,
            indice_key: str | None = None,
            algo: ConvAlgo | None = None,
            record_voxel_count: bool = False,
            name: str | None = None,
        ) -> None:
            super().__init__(
                ndim, kernel_size, stride, padding, dilation, indice_key, algo=algo,
                record_voxel_count=record_voxel_count, name=name,
            )  # fmt: skip

    Ranked.__name__ = Ranked.__qualname__ = f"{kind.__name__}{ndim}d"
    Ranked.__doc__ = f"{kind.__doc__} Axes: {ndim}."
    return Ranked


SparseMaxPool1d, SparseMaxPool2d, SparseMaxPool3d, SparseMaxPool4d = (
    _ranked(SparseMaxPool, ndim) for ndim in range(1, 5)
)
SparseAvgPool1d, SparseAvgPool2d, SparseAvgPool3d = (
    _ranked(SparseAvgPool, ndim) for ndim in range(1, 4)
)
