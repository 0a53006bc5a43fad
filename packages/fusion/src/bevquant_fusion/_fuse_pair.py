"""Fold one batch norm module into one convolution or linear module."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_graph import all_finite, ordinary_tensors
from bevquant_sparse import WeightLayout, get_weight, set_weight

from ._fold import Part
from ._foldable import fold_problem
from ._ranges import is_sparse, scale_ranges, unchanged_on_error
from ._weights import (
    absorb_norm,
    fuse_conv_bn_weights,
    fuse_sparse_conv_bn_weights,
    scale_and_bias,
    scale_of,
)

ConvT = TypeVar("ConvT", bound=nn.Module)


class Norm(NamedTuple):
    """Parameters of a batch norm, in the order of the weight functions' arguments."""

    mean: Tensor
    var: Tensor
    eps: float
    weight: Tensor | None
    bias: Tensor | None


def fuse_conv_bn(conv: ConvT, bn: nn.Module) -> ConvT:
    """Return a copy of ``conv`` that computes ``bn(conv(x))``.

    ``W' = W·γ/√(σ² + ε)``, ``b' = (b − μ)·γ/√(σ² + ε) + β``, in float64, rounded once. The copy
    is of the same class, always has a bias, and keeps dtype, device, mode and ``requires_grad``.
    A quantized layer's range of the weight is folded too, ``amax' = amax·|γ|/√(σ² + ε)`` per
    output channel, so that its integers stay.

    Args:
        conv: ``Conv1d/2d/3d``, ``ConvTranspose1d/2d/3d`` (any groups) or ``Linear`` (for inputs
            ``[rows, features]``: with more axes ``BatchNorm1d`` normalises another one).
        bn: ``BatchNorm1d/2d/3d`` or ``SyncBatchNorm`` in evaluation mode with running statistics.

    Raises:
        ValueError: The two cannot be folded: training mode, no running statistics, lazy and not
            initialised, another number of channels, hooks, parametrizations, an activation in
            the convolution, weights that would overflow their dtype, one range for a quantized
            weight whose channels are scaled differently.
        TypeError: ``conv`` is a sparse convolution.

    Example:
        >>> import torch
        >>> conv, bn = torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.BatchNorm2d(4).eval()
        >>> fused, x = fuse_conv_bn(conv, bn), torch.randn(1, 3, 5, 5)
        >>> torch.allclose(fused(x), bn(conv(x)), atol=1e-5), conv.bias is None
        (True, True)
    """
    if is_sparse(conv):
        raise TypeError(f"{type(conv).__name__} is a sparse convolution; use fuse_sparse_conv_bn")
    return _folded_copy(conv, bn)


def fuse_sparse_conv_bn(conv: ConvT, bn: nn.Module) -> ConvT:
    """Return a copy of the sparse convolution ``conv`` that computes ``bn`` on its features too.

    The weight's layout comes from the module's class (``bevquant_sparse.layout_of``), never from
    its shape, and spconv 2's other reading of 1×1×1 kernels is honoured. SubM, strided, inverse
    and transposed convolutions of any known or registered class.

    Args:
        conv: A sparse convolution module.
        bn: ``BatchNorm1d`` or ``SyncBatchNorm`` in evaluation mode with running statistics.

    Raises:
        ValueError: As ``fuse_conv_bn``; and where the class's layout is unknown.
        TypeError: ``conv`` is not a sparse convolution.

    Example:
        >>> import torch
        >>> from bevquant_sparse import WeightLayout, register_layout
        >>> class Sparse1(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.ones(3, 3, 3, 5, 2))
        ...         self.bias = None
        >>> register_layout(Sparse1, WeightLayout.RSCK)
        >>> bn = torch.nn.BatchNorm1d(2, eps=0.0).eval()
        >>> _ = bn.weight.data.copy_(torch.tensor([2.0, 3.0]))
        >>> fuse_sparse_conv_bn(Sparse1(), bn).weight[0, 0, 0, 0].tolist()
        [2.0, 3.0]
    """
    if not is_sparse(conv):
        raise TypeError(
            f"{type(conv).__name__} is not a known sparse convolution; use fuse_conv_bn, or "
            "register_layout of bevquant_sparse for a class of your own"
        )
    return _folded_copy(conv, bn)


def fold_into(conv: nn.Module, norm: Norm) -> None:
    """Fold ``norm`` into ``conv`` in place; that they fit was asked before."""
    with unchanged_on_error(conv):
        # First, as a range is scaled together with the weight that it belongs to.
        scale_ranges(conv, scale_of(*norm))
        _fold_weights(conv, norm)
    settle = getattr(conv, "settle_ranges", None)  # as bevquant_quantizers.calibrate calls it
    if settle is not None:
        settle()


def _fold_weights(conv: nn.Module, norm: Norm) -> None:
    layer: Any = conv
    bias: Tensor | None = layer.bias
    if is_sparse(conv):
        weight, new_bias = fuse_sparse_conv_bn_weights(
            get_weight(conv, WeightLayout.RSCK),
            None if bias is None else bias.reshape(-1),
            *norm,
            layout=WeightLayout.RSCK,
        )
        _check_finite(conv, weight, new_bias)
        set_weight(conv, weight, WeightLayout.RSCK)
        if bias is not None:
            new_bias = nn.Parameter(new_bias.detach().reshape(bias.shape), bias.requires_grad)
    else:
        groups = () if isinstance(conv, nn.Linear) else (layer.transposed, layer.groups)
        weight, new_bias = fuse_conv_bn_weights(layer.weight, bias, *norm, *groups)
        _check_finite(conv, weight, new_bias)
        conv.weight = weight
    conv.bias = new_bias


def fold_parts(layers: list[tuple[nn.Module, Part]], norm: Norm, *, ahead: bool = False) -> None:
    """Fold ``norm`` into layers before it, or ``ahead`` of them, in place; they can take it."""
    # All or none: an error in one layer undoes the others.
    with ExitStack() as stack:
        for conv, _ in layers:
            stack.enter_context(unchanged_on_error(conv))
        for conv, part in layers:
            own, layer = _picked(norm, part), cast(Any, conv)
            if not ahead:
                fold_into(layer, own)
                continue
            groups = getattr(layer, "groups", 1)
            layer.weight, layer.bias = absorb_norm(layer.weight, layer.bias, own, groups)
            _check_finite(layer, layer.weight, layer.bias)


def _picked(norm: Norm, part: Part) -> Norm:
    """A layer's share of a norm per channel, in float64; s = 1, t = 0 for none."""
    own = torch.tensor(part.channels, device=norm.mean.device)

    def of(value: Tensor | None, none: float, given: bool = True) -> Tensor:
        filled = torch.full(own.shape, none, dtype=torch.float64, device=own.device)
        if value is None or not given:
            return filled
        return torch.where(own < 0, filled, value.detach().double()[own.clamp_min(0)])

    # Of several layers in a sum, one adds the shift.
    mean, var = of(norm.mean, 0.0, part.shifted), of(norm.var.double() + norm.eps, 1.0)
    return Norm(mean, var, 0.0, of(norm.weight, 1.0), of(norm.bias, 0.0, part.shifted))


def as_convolution(norm: Norm, axes: int) -> nn.Module:
    """The depthwise 1×1 convolution that computes ``norm``: W = γ/√(σ² + ε), b = β − μ·W."""
    channels = int(norm.mean.shape[0])
    like = norm.mean if norm.weight is None else norm.weight
    weight, bias = scale_and_bias(None, *norm, channels, like.device)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    made: Any = kind(channels, channels, 1, groups=channels, device=like.device, dtype=like.dtype)
    with torch.no_grad():
        made.weight.copy_(weight.reshape(made.weight.shape))
        made.bias.copy_(bias)
    _check_finite(made, made.weight, made.bias)
    convolution: nn.Module = made.requires_grad_(like.requires_grad).eval()
    return convolution


def norm_of(bn: nn.Module) -> Norm:
    """The numbers of a batch norm module that keeps running statistics."""
    norm = cast(_BatchNorm, bn)
    mean, var = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
    return Norm(mean, var, norm.eps, norm.weight, norm.bias)


@ordinary_tensors()
def _folded_copy(conv: ConvT, bn: nn.Module) -> ConvT:
    problem = fold_problem(conv, bn)
    if problem is not None:
        raise ValueError(f"cannot fold {type(bn).__name__} into {type(conv).__name__}: {problem}")
    fused = copy.deepcopy(conv)
    fold_into(fused, norm_of(bn))
    return fused


def _check_finite(conv: nn.Module, weight: Tensor, bias: Tensor) -> None:
    for name, tensor in (("weight", weight), ("bias", bias)):
        if not all_finite(tensor):
            raise ValueError(
                f"cannot fold into {type(conv).__name__}: the folded {name} is not finite in "
                f"{tensor.dtype}; check the statistics, or fold in float32"
            )
