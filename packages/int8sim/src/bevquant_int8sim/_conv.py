"""Linear layers and convolutions over one to three axes, in integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bevquant_int8sim._dense import check_bias, check_operands, run_dense
from bevquant_int8sim._grid_axes import (
    Axis,
    check_outputs,
    conv_axis,
    per_axis,
    per_side,
    transposed_axis,
    transposed_size,
)
from bevquant_int8sim._output import make_output, with_addend
from bevquant_int8sim._prepared import Memo, layouts
from bevquant_sparse.runtime.eager import eager

Ints = int | Sequence[int]
Padding = int | Sequence[int] | Sequence[Sequence[int]]


@eager
def int8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    multiplier: Tensor | float | None = None,
    backend: str = "auto",
    name: str = "int8_linear",
    **output: Any,
) -> Tensor:
    r"""Linear layer: :math:`q = \operatorname{requantize}(x W^T + b)`.

    Args:
        x: int8 (or int16) ``[..., in_features]``.
        weight: int8 ``[out_features, in_features]``.
        bias: int32 ``[out_features]`` in units of the accumulator, or ``None``.
        multiplier: s_x·s_w / s_y; ``None`` returns the int32 accumulators.
        backend: As in `int8_sparse_conv`.
        name: The layer that a message names.
        **output: ``relu``, ``out_dtype``, ``narrow_range``, ``rounding``, ``arithmetic``, as in
            `int8_sparse_conv`.

    Returns:
        ``[..., out_features]``.

    Raises:
        TypeError: An operand is of another type than said above.
        ValueError: Shapes, a setting or a multiplier do not fit.
        AccumulatorOverflowError: A sum leaves int32.

    Example:
        >>> import torch
        >>> x = torch.tensor([[1, -2]], dtype=torch.int8)
        >>> w = torch.tensor([[3, 4], [100, 0]], dtype=torch.int8)
        >>> int8_linear(x, w).tolist(), int8_linear(x, w, multiplier=0.5).tolist()
        ([[-5, 100]], [[-2, 50]])
    """
    check_operands(x, weight, bias, name)
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: expected x [..., {weight.shape[-1]}] for a weight [out_features, "
            f"in_features], got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    check_bias(bias, weight.shape[0], name)
    settings = make_output(multiplier, weight.shape[0], name=name, **output)
    count = math.prod(x.shape[:-1])
    rows = x.reshape(1, count, x.shape[-1]).movedim(-1, 1)
    # Rows are pixels of one axis, under a kernel of one element.
    axis = Axis(count, count, count, 0, 1, 0, 1, (0,), (0,))
    by_group = weight.t()[None, None]
    out = run_dense(rows, weight, by_group, bias, [(axis,)], (1,), settings, backend, name)
    return out.movedim(1, -1).reshape(*x.shape[:-1], weight.shape[0])


@eager
def int8_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, **settings: Any) -> Tensor:
    """Convolution over one axis, ``[batch, channels, length]``; arguments as of `int8_conv2d`.

    Example:
        >>> import torch
        >>> x = torch.tensor([[[1, 2, 3]]], dtype=torch.int8)
        >>> int8_conv1d(x, torch.ones(1, 1, 2, dtype=torch.int8), padding=[(1, 0)]).tolist()
        [[[1, 3, 5]]]
    """
    return _convolution(1, x, weight, bias, **{"name": "int8_conv1d", **settings})


@eager
def int8_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    multiplier: Tensor | float | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    addend: Tensor | None = None,
    addend_multiplier: float = 1.0,
    backend: str = "auto",
    name: str = "int8_conv2d",
    **output: Any,
) -> Tensor:
    r"""Convolution over two axes, as ``torch.nn.functional.conv2d`` on integers.

    .. math:: q = \operatorname{clamp}(\operatorname{round}((x * w + b)\, M_c), q_\min, q_\max)

    Outside of the input are zeros, the integer of the value 0.

    Args:
        x: int8 (or int16) ``[batch, in_channels, height, width]``; any memory format.
        weight: int8 ``[out_channels, in_channels / groups, kernel height, kernel width]``.
        bias: int32 ``[out_channels]`` in units of the accumulator, or ``None``.
        multiplier: s_x·s_w / s_y, one number or one per output channel; ``None`` returns the int32
            accumulators.
        stride: One integer or one per axis, as `dilation`.
        padding: One integer, one per axis, or one pair (before, behind) per axis.
        dilation: Distance of the kernel's elements.
        groups: Groups of channels.
        addend: int8, shaped as the output (the identity of a residual block). The sum is rounded
            once: ``clamp(round((x * w + b)·multiplier + addend·addend_multiplier))``.
        addend_multiplier: Scale of `addend` over that of the output.
        backend: As in `int8_sparse_conv`.
        name: The layer that a message names.
        **output: ``relu``, ``out_dtype``, ``narrow_range``, ``rounding``, ``arithmetic``, as in
            `int8_sparse_conv`; the defaults of the last two and int8 where there is an `addend`.

    Returns:
        ``[batch, out_channels, height, width]``, channels last in memory.

    Raises:
        TypeError: An operand is of another type than said above.
        ValueError: Shapes, a setting or a multiplier do not fit.
        AccumulatorOverflowError: A sum leaves int32.

    Example:
        >>> import torch
        >>> x = torch.arange(4, dtype=torch.int8).view(1, 1, 2, 2)
        >>> w = torch.full((1, 1, 2, 2), 10, dtype=torch.int8)
        >>> int8_conv2d(x, w).item(), int8_conv2d(x, w, multiplier=0.25).item()
        (60, 15)
    """
    return _convolution(
        2, x, weight, bias, multiplier=multiplier, stride=stride, padding=padding,
        dilation=dilation, groups=groups, addend=addend, addend_multiplier=addend_multiplier,
        backend=backend, name=name, **output,
    )  # fmt: skip


@eager
def int8_conv3d(x: Tensor, weight: Tensor, bias: Tensor | None = None, **settings: Any) -> Tensor:
    """Convolution over three axes, ``[batch, channels, *grid]``; arguments as of `int8_conv2d`.

    Example:
        >>> import torch
        >>> x = torch.ones(1, 2, 3, 3, 3, dtype=torch.int8)
        >>> int8_conv3d(x, torch.ones(1, 2, 3, 3, 3, dtype=torch.int8)).item()
        54
    """
    return _convolution(3, x, weight, bias, **{"name": "int8_conv3d", **settings})


def _convolution(
    ndim: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    name: str,
    multiplier: Tensor | float | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    addend: Tensor | None = None,
    addend_multiplier: float = 1.0,
    backend: str = "auto",
    **output: Any,
) -> Tensor:
    given = (stride, padding, dilation, groups, backend, addend_multiplier, *output.items())
    memo = Memo(layouts(x, addend), weight, bias, multiplier, given)
    if memo.prepared is not None:
        return memo.run(x, addend)
    _check_shapes(x, weight, bias, ndim, groups, 1, name)
    channels = weight.shape[0]
    check_bias(bias, channels, name)
    settings = make_output(multiplier, channels, name=name, **output)
    kernel = tuple(weight.shape[2:])
    axes = tuple(
        conv_axis(*arguments, name)
        for arguments in zip(
            x.shape[2:],
            kernel,
            per_axis(stride, ndim, f"{name}: stride", 1),
            per_side(padding, ndim, f"{name}: padding"),
            per_axis(dilation, ndim, f"{name}: dilation", 1),
            strict=True,
        )
    )
    check_outputs((len(x), *(axis.out_size for axis in axes)), name)
    by_group = weight.reshape(groups, channels // groups, weight.shape[1], math.prod(kernel))
    # Output channels side by side, which fill the lanes of a vector.
    by_group = by_group.permute(0, 3, 2, 1)
    if addend is not None:
        shape = (len(x), channels, *(axis.out_size for axis in axes))
        settings = with_addend(settings, addend, addend_multiplier, shape, x.device)
    return run_dense(x, weight, by_group, bias, [axes], kernel, settings, backend, name, memo)


@eager
def int8_conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    multiplier: Tensor | float | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    backend: str = "auto",
    name: str = "int8_conv_transpose2d",
    **output: Any,
) -> Tensor:
    """Transposed convolution, as ``torch.nn.functional.conv_transpose2d`` on integers.

    Input i adds ``x[i]·w[k]`` to output ``i·stride − padding + k·dilation``.

    Args:
        x: int8 (or int16) ``[batch, in_channels, height, width]``.
        weight: int8 ``[in_channels, out_channels / groups, kernel height, kernel width]``.
        bias: int32 ``[out_channels]`` in units of the accumulator, or ``None``.
        multiplier: s_x·s_w / s_y, one number or one per output channel (axis 1 of the weight).
        stride: One integer or one per axis, as all that follow.
        padding: Outputs cut off at every side.
        output_padding: Outputs added behind, smaller than stride or dilation.
        dilation: Distance of the kernel's elements.
        groups: Groups of channels.
        backend: As in `int8_sparse_conv`.
        name: The layer that a message names.
        **output: As in `int8_conv2d`.

    Returns:
        ``[batch, out_channels, height, width]``, channels last in memory.

    Raises:
        TypeError: An operand is of another type than said above.
        ValueError: Shapes, a setting or a multiplier do not fit.
        AccumulatorOverflowError: A sum leaves int32.

    Example:
        >>> import torch
        >>> x = torch.tensor([[[[1, 2]]]], dtype=torch.int8)
        >>> w = torch.tensor([[[[1, 10]]]], dtype=torch.int8)
        >>> int8_conv_transpose2d(x, w, stride=2).tolist()
        [[[[1, 10, 2, 20]]]]
    """
    given = (stride, padding, output_padding, dilation, groups, backend, *output.items())
    memo = Memo(layouts(x, None), weight, bias, multiplier, given)
    if memo.prepared is not None:
        return memo.run(x, None)
    _check_shapes(x, weight, bias, 2, groups, 0, name)
    channels = weight.shape[1] * groups
    check_bias(bias, channels, name)
    settings = make_output(multiplier, channels, name=name, **output)
    kernel = tuple(weight.shape[2:])
    steps = per_axis(stride, 2, f"{name}: stride", 1)
    cuts = per_axis(padding, 2, f"{name}: padding", 0)
    added = per_axis(output_padding, 2, f"{name}: output_padding", 0)
    dilations = per_axis(dilation, 2, f"{name}: dilation", 1)
    if any(a >= max(s, d) for a, s, d in zip(added, steps, dilations, strict=True)):
        raise ValueError(f"{name}: output_padding={added} must be below stride or dilation")
    axes = [
        (n, kernel[i], steps[i], cuts[i], added[i], dilations[i]) for i, n in enumerate(x.shape[2:])
    ]
    check_outputs((len(x), *(transposed_size(*axis) for axis in axes)), name)
    rows, columns = (transposed_axis(*axis, name) for axis in axes)
    phases = [(row, column) for row in rows for column in columns]
    by_group = weight.reshape(groups, x.shape[1] // groups, weight.shape[1], math.prod(kernel))
    by_group = by_group.permute(0, 3, 1, 2)
    return run_dense(x, weight, by_group, bias, phases, kernel, settings, backend, name, memo)


def _check_shapes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ndim: int,
    groups: int,
    channel_axis: int,
    name: str,
) -> None:
    """Operands, channels of `x` and of `weight` along `channel_axis`, and the groups of both."""
    check_operands(x, weight, bias, name)
    if type(groups) is not int or groups < 1:
        raise ValueError(f"{name}: groups={groups}: expected a positive integer")
    fits = x.dim() == weight.dim() == ndim + 2
    if fits:
        share = weight.shape[1] * groups if channel_axis else weight.shape[0]
        fits = share == x.shape[1] and weight.shape[0] % groups == 0
    if not fits:
        order = "out, in / groups" if channel_axis else "in, out / groups"
        raise ValueError(
            f"{name}: x of shape {tuple(x.shape)} and a weight [{order}, *kernel] of shape "
            f"{tuple(weight.shape)} do not fit with groups={groups} and {ndim} grid axes"
        )
