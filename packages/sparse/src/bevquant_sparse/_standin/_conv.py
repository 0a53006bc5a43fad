"""`spconv.pytorch.conv`: sparse convolutions."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_sparse._kernels import ConvInner
from bevquant_sparse._standin._algorithms import ConvAlgo
from bevquant_sparse._standin._sequential import SparseModule
from bevquant_sparse._standin._tensor import expand_nd

__name__ = "spconv.pytorch.conv"


class Activation(Enum):
    """Activation behind a convolution: `cumm.tensorview.gemm.Activation` of spconv."""

    None_ = 0
    ReLU = 1
    Sigmoid = 2
    LeakyReLU = 3


class SparseConvolutionBase:
    """What spconv's quantization-aware convolutions share with the others."""

    _conv_forward: Any = ConvInner._conv_forward

    def is_inverseable(self: Any) -> bool:
        """Whether an inverse convolution can undo this one."""
        return self.indice_key is not None and not self.subm


class SparseConvolution(SparseConvolutionBase, SparseModule):
    """Submanifold, strided, transposed or inverse sparse convolution of 1 to 4 axes.

    ``weight`` is ``[out, *kernel, in]`` (KRSC), from U(−b, b) with b = 1 / √(in · kernel volume),
    as ``bias``.

    Args:
        ndim: Number of axes.
        in_channels: Input channels.
        out_channels: Output channels.
        kernel_size: One number, or one for each axis; so ``stride``, ``padding``, ``dilation`` and
            ``output_padding``.
        stride: Stride.
        padding: Padding; submanifold ones imply it.
        dilation: Dilation.
        groups: 1; others do not exist.
        bias: Whether there is a bias.
        subm: Outputs are the input's voxels.
        output_padding: Of transposed ones.
        transposed: Transposed convolution.
        inverse: Undo the convolution or pooling that ran under ``indice_key``.
        indice_key: Layers of one key share a rulebook.
        algo: Kept as an attribute.
        fp32_accum: Kept as an attribute: sums are float32 at least.
        record_voxel_count: Keep the largest number of outputs in a buffer.
        act_type: Activation of the output.
        act_alpha: Slope of a leaky one.
        act_beta: Kept as an attribute.
        large_kernel_fast_algo: Ignored.
        name: Named in errors.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: ``groups`` is not 1, a setting has another number of axes, or a 1×…×1 kernel of
            stride 1 has padding.
    """

    def __init__(
        self,
        ndim: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = 3,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        subm: bool = False,
        output_padding: Any = 0,
        transposed: bool = False,
        inverse: bool = False,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        act_type: Any = Activation.None_,
        act_alpha: float = 0,
        act_beta: float = 0,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        SparseModule.__init__(self, name=name)
        if groups != 1:
            raise ValueError(
                f"{type(self).__name__}: groups={groups}; grouped sparse convolutions do not "
                "exist, use groups=1"
            )
        self.ndim, self.in_channels, self.out_channels = ndim, in_channels, out_channels
        self.kernel_size = expand_nd(ndim, kernel_size)
        self.stride = expand_nd(ndim, stride)
        self.padding = expand_nd(ndim, padding)
        self.dilation = expand_nd(ndim, dilation)
        self.output_padding = expand_nd(ndim, output_padding)
        # Of these spconv reads the weight as [in, out]: `get_weight` honours it.
        self.conv1x1 = math.prod(self.kernel_size) == 1 and (subm or math.prod(self.stride) == 1)
        if self.conv1x1 and not subm and any(self.padding):
            raise ValueError(
                f"{type(self).__name__}: padding={self.padding} of a 1×…×1 kernel of stride 1; "
                "expected 0"
            )
        self.transposed, self.inverse, self.subm = transposed, inverse, subm
        self.groups, self.indice_key = groups, indice_key
        self.algo = ConvAlgo.Native if algo is None else algo
        self.fp32_accum = fp32_accum
        self.record_voxel_count = record_voxel_count
        self.act_type, self.act_alpha, self.act_beta = act_type, act_alpha, act_beta
        self.weight_shape = [out_channels, *self.kernel_size, in_channels]
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(self.weight_shape, **kind))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_channels, **kind)) if bias else None
        )
        if self.record_voxel_count:
            self.register_buffer(
                "max_num_voxels_during_training", torch.zeros(1, dtype=torch.int32, device=device)
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias anew."""
        bound = 1 / math.sqrt(max(1, self.in_channels * math.prod(self.kernel_size)))
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self) -> str:
        """The settings, as spconv shows them."""
        names = ("kernel_size", "stride", "padding", "dilation", "output_padding")
        shown = [f"{self.in_channels}, {self.out_channels}"]
        shown += [f"{name}={getattr(self, name)}" for name in names]
        shown += [] if self.bias is not None else ["bias=False"]
        return ", ".join([*shown, f"algo={self.algo}"])

    def get_max_num_voxels(self) -> Tensor | None:
        """The largest number of output voxels so far, where it is recorded."""
        return getattr(self, "max_num_voxels_during_training", None)

    def forward(self, input: Any, add_input: Any = None) -> Any:
        """``act(conv(input) + bias [+ add_input])``."""
        return self._conv_forward(
            self.training, input, self.weight, self.bias, add_input, act_type=self.act_type,
            act_alpha=self.act_alpha, act_beta=self.act_beta,
        )  # fmt: skip


def _named(cls: type, name: str, what: str, ndim: int) -> Any:
    cls.__name__ = cls.__qualname__ = name
    cls.__doc__ = f"{what} sparse convolution of {ndim} axes."
    return cls


def _submanifold(ndim: int) -> Any:
    class Convolution(SparseConvolution):
        def __init__(
            self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1,
            padding: Any = 0, dilation: Any = 1, groups: int = 1, bias: bool = True,
            indice_key: str | None = None, algo: ConvAlgo | None = None,
            fp32_accum: bool | None = None, large_kernel_fast_algo: bool = False,
            name: str | None = None,
        ) -> None:  # fmt: skip
            super().__init__(
                ndim, in_channels, out_channels, kernel_size, stride, padding, dilation, groups,
                bias, subm=True, indice_key=indice_key, algo=algo, fp32_accum=fp32_accum, name=name,
            )  # fmt: skip

    return _named(Convolution, f"SubMConv{ndim}d", "Submanifold", ndim)


def _strided(ndim: int, transposed: bool) -> Any:
    class Convolution(SparseConvolution):
        def __init__(
            self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1,
            padding: Any = 0, dilation: Any = 1, groups: int = 1, bias: bool = True,
            indice_key: str | None = None, algo: ConvAlgo | None = None,
            fp32_accum: bool | None = None, record_voxel_count: bool = False,
            large_kernel_fast_algo: bool = False, name: str | None = None,
        ) -> None:  # fmt: skip
            super().__init__(
                ndim, in_channels, out_channels, kernel_size, stride, padding, dilation, groups,
                bias, transposed=transposed, indice_key=indice_key, algo=algo,
                fp32_accum=fp32_accum, record_voxel_count=record_voxel_count, name=name,
            )  # fmt: skip

    if transposed:
        return _named(Convolution, f"SparseConvTranspose{ndim}d", "Transposed", ndim)
    return _named(Convolution, f"SparseConv{ndim}d", "Strided", ndim)


def _inverse(ndim: int) -> Any:
    class Convolution(SparseConvolution):
        def __init__(
            self, in_channels: int, out_channels: int, kernel_size: Any, indice_key: str | None,
            bias: bool = True, algo: ConvAlgo | None = None, fp32_accum: bool | None = None,
            large_kernel_fast_algo: bool = False, name: str | None = None,
        ) -> None:  # fmt: skip
            super().__init__(
                ndim, in_channels, out_channels, kernel_size, bias=bias, inverse=True,
                indice_key=indice_key, algo=algo, fp32_accum=fp32_accum, name=name,
            )  # fmt: skip

    return _named(Convolution, f"SparseInverseConv{ndim}d", "Inverse", ndim)


_RANKS = range(1, 5)
SubMConv1d, SubMConv2d, SubMConv3d, SubMConv4d = map(_submanifold, _RANKS)
SparseConv1d, SparseConv2d, SparseConv3d, SparseConv4d = (_strided(n, False) for n in _RANKS)
SparseConvTranspose1d, SparseConvTranspose2d, SparseConvTranspose3d, SparseConvTranspose4d = (
    _strided(n, True) for n in _RANKS
)
SparseInverseConv1d, SparseInverseConv2d, SparseInverseConv3d, SparseInverseConv4d = map(
    _inverse, _RANKS
)
DEFAULT_SPARSE_CONV_TYPES = {
    kind
    for kind in (
        SubMConv1d, SubMConv2d, SubMConv3d, SubMConv4d, SparseConv1d, SparseConv2d, SparseConv3d,
        SparseConv4d, SparseConvTranspose1d, SparseConvTranspose2d, SparseConvTranspose3d,
        SparseConvTranspose4d, SparseInverseConv1d, SparseInverseConv2d, SparseInverseConv3d,
        SparseInverseConv4d,
    )
}  # fmt: skip
