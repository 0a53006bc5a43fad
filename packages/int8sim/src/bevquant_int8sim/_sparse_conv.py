"""The sparse convolution in integers: checks, choice of a backend, requantization."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bevquant_int8sim._backends import choose_backend
from bevquant_int8sim._matmul import exact_matmul, gathered
from bevquant_int8sim._output import Output, make_output
from bevquant_int8sim._prepared import Memo, remembered
from bevquant_int8sim._scales import (
    check_accumulators,
    check_integer_tensor,
    checked_scale,
    fits_by_type,
    fits_by_values,
    sums_of_sizes,
)
from bevquant_sparse import Rulebook, WeightLayout, permute_weight
from bevquant_sparse.runtime.eager import eager

if TYPE_CHECKING:
    from bevquant_int8sim._compiled.sparse import SparseLayer

_BLOCK_VALUES = 2**24  # gathered values of a block


@eager
def int8_sparse_conv(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rulebook: Rulebook,
    *,
    layout: WeightLayout,
    multiplier: Tensor | float | None = None,
    residual: Tensor | None = None,
    sum_multiplier: float = 1.0,
    relu: bool = False,
    out_dtype: torch.dtype = torch.int8,
    narrow_range: bool = False,
    rounding: str = "half_even",
    arithmetic: str = "float64",
    backend: str = "auto",
    name: str = "int8_sparse_conv",
) -> Tensor:
    r"""Convolve integer features along the pairs of a rulebook.

    .. math:: a_{oc} = b_c + \sum_k \sum_i x_{n(o,k) i}\, w_{kic}, \quad
              q_{oc} = \operatorname{clamp}(\operatorname{round}(a_{oc} M_c), q_\min, q_\max)

    with n(o, k) the input row that output o sees under offset k; absent neighbours add nothing.
    Submanifold, strided, transposed and inverse convolutions differ in their rulebook only. The
    sum is exact: a bound shows that it fits the 32-bit accumulator, or it is computed wider and
    checked. Every backend and any number of threads give the same integers.

    Args:
        features: int8 (or int16) ``[num_in, in_channels]``.
        weight: int8 in `layout`.
        bias: int32 ``[out_channels]`` in units of the accumulator (`quantize_bias`), or ``None``.
        rulebook: The pairs, on the features' device.
        layout: Axis order of `weight`.
        multiplier: s_x·s_w / s_y, one number or one per output channel. ``None`` returns the
            int32 accumulators.
        residual: int8 ``[num_out, out_channels]`` of the scale of q, added to it (the identity of a
            residual block): the output is then ``clamp(round((q + residual) · sum_multiplier))``.
        sum_multiplier: With a residual, the scale of q over that of the output.
        relu: Clamp at 0 from below, behind everything else.
        out_dtype: int8, int16 or int32 requantized; float32 gives ``float32(acc · multiplier)``,
            the multiplier then being s_x·s_w.
        narrow_range: Leave out the most negative integer of the output.
        rounding: ``"half_even"``, ``"half_up"`` or ``"half_away"`` (see `quantize`).
        arithmetic: ``"float64"`` or ``"fixed_point"`` (see `requantize`).
        backend: ``"amx"`` (numba, AMX instructions where the channels fit them and VNNI elsewhere,
            int8), ``"vnni"`` (numba, VNNI instructions, int8), ``"portable"`` (numba, any CPU),
            ``"torch"`` (any device) or ``"auto"``, the first of these that runs here and passes its
            self-test (`backend_report`).
        name: The layer that a message names.

    Returns:
        ``[num_out, out_channels]`` in `out_dtype`, or int32 without a multiplier.

    Raises:
        TypeError: An operand is of another type than said above.
        ValueError: A shape, device, setting or multiplier does not fit, or the backend cannot run.
        AccumulatorOverflowError: A sum leaves int32.

    Example:
        >>> from bevquant_sparse import build_rulebook
        >>> indices = torch.tensor([[0, 1], [0, 2], [0, 5]], dtype=torch.int32)
        >>> rulebook = build_rulebook(indices, [8], 3, subm=True, batch_size=1)
        >>> x = torch.tensor([[1], [10], [100]], dtype=torch.int8)
        >>> w = torch.tensor([1, 2, 3], dtype=torch.int8).view(3, 1, 1)
        >>> int8_sparse_conv(x, w, None, rulebook, layout=WeightLayout.RSCK).flatten().tolist()
        [32, 21, 200]
        >>> q = int8_sparse_conv(x, w, None, rulebook, layout=WeightLayout.RSCK, multiplier=0.5)
        >>> q.flatten().tolist()
        [16, 10, 100]
    """
    given = (layout, sum_multiplier, relu, out_dtype, narrow_range, rounding, arithmetic, backend)
    memo = Memo(_channels_of(features, residual, rulebook), weight, bias, multiplier, given)
    if memo.prepared is not None and _rows_fit(features, residual, rulebook):
        return memo.prepared(features, rulebook, residual)
    check_integer_tensor(name, "features", features, (torch.int8, torch.int16))
    check_integer_tensor(name, "weight", weight, (torch.int8,))
    _check_weight(features, weight, rulebook, layout, name)
    channels = layout.channels(weight)[1]
    if bias is not None:
        check_integer_tensor(name, "bias", bias, (torch.int32,))
        _check_bias(bias, features, channels, name)
    output = make_output(
        multiplier,
        channels,
        out_dtype=out_dtype,
        narrow_range=narrow_range,
        relu=relu,
        rounding=rounding,
        arithmetic=arithmetic,
        name=name,
    )
    if residual is not None:
        output = _with_residual(
            output, residual, sum_multiplier, features, rulebook, channels, name
        )
    chosen = choose_backend(backend, features.device, features.dtype, name)
    sums = remembered(
        weight, ("sums", layout.out_axis), lambda: sums_of_sizes(weight, layout.out_axis)
    )
    safe = fits_by_type(features, sums, bias)
    fits = safe or fits_by_values(features, sums, bias)
    if fits and chosen != "torch" and 0 not in (*features.shape, rulebook.num_out, channels):
        layer = _compiled(weight, bias, rulebook, layout, output, features.dtype, chosen)
        # By values, sums fit for this frame alone.
        if safe:
            memo.keep(layer)
        return layer(features, rulebook, residual)
    matrix = _as_matrices(weight, rulebook, layout)
    acc = _accumulated(features, matrix, bias, rulebook, fits_int32=fits)
    if not fits:
        check_accumulators(acc, name)
    return output.finish(acc.to(torch.int32))


def _as_matrices(weight: Tensor, rulebook: Rulebook, layout: WeightLayout) -> Tensor:
    """The weight as ``[volume, in_channels, out_channels]``."""
    size = rulebook.kernel_size if layout is WeightLayout.VCK else None
    return permute_weight(weight, layout, WeightLayout.VCK, kernel_size=size)


def _check_weight(
    features: Tensor, weight: Tensor, rulebook: Rulebook, layout: WeightLayout, name: str
) -> None:
    if not isinstance(rulebook, Rulebook):
        raise TypeError(f"{name}: rulebook must be a Rulebook, got {type(rulebook).__name__}")
    if not isinstance(layout, WeightLayout):
        raise TypeError(f"{name}: layout must be a WeightLayout, got {layout!r}")
    if features.dim() != 2 or features.shape[0] != rulebook.num_in:
        raise ValueError(
            f"{name}: expected features [{rulebook.num_in}, channels], one row per input voxel of "
            f"the rulebook, got {tuple(features.shape)}"
        )
    for what, value in (("weight", weight), ("rulebook", rulebook.in_indices)):
        if value.device != features.device:
            raise ValueError(
                f"{name}: {what} on {value.device}, features on {features.device}; move one of them"
            )
    rank = len(rulebook.kernel_size)
    expected = (rulebook.kernel_volume,) if layout is WeightLayout.VCK else rulebook.kernel_size
    axes = 3 if layout is WeightLayout.VCK else rank + 2
    if (
        weight.dim() != axes
        or tuple(layout.kernel_size(weight)) != tuple(expected)
        or layout.channels(weight)[0] != features.shape[1]
    ):
        raise ValueError(
            f"{name}: a {layout.name} weight of shape {tuple(weight.shape)} does not fit kernel "
            f"size {tuple(rulebook.kernel_size)} and features with {features.shape[1]} channels; "
            "check the layout and the layer that the rulebook was built for"
        )


def _with_residual(
    output: Output,
    residual: Tensor,
    sum_multiplier: float,
    features: Tensor,
    rulebook: Rulebook,
    channels: int,
    name: str,
) -> Output:
    check_integer_tensor(name, "residual", residual, (torch.int8,))
    if output.multiplier is None or output.out_dtype != torch.int8:
        raise ValueError(f"{name}: a residual is added to int8; give a multiplier, out_dtype int8")
    if tuple(residual.shape) != (rulebook.num_out, channels):
        raise ValueError(
            f"{name}: expected a residual [{rulebook.num_out}, {channels}], got "
            f"{tuple(residual.shape)}"
        )
    if residual.device != features.device:
        raise ValueError(f"{name}: residual on {residual.device}, features on {features.device}")
    factor = checked_scale(sum_multiplier, f"{name}: sum_multiplier")
    return replace(output, residual=residual, sum_multiplier=float(factor))


def _check_bias(bias: Tensor, features: Tensor, channels: int, name: str) -> None:
    if tuple(bias.shape) != (channels,) or bias.device != features.device:
        raise ValueError(
            f"{name}: expected bias [{channels}] on {features.device}, got "
            f"{tuple(bias.shape)} on {bias.device}"
        )


def _channels_of(features: Tensor, residual: Tensor | None, rulebook: Rulebook) -> Hashable:
    """Common properties of frames that a layer treats alike; ``None`` for refused ones."""
    if not isinstance(rulebook, Rulebook):
        return None
    tensors = [t for t in (features, residual) if t is not None]
    if not all(isinstance(t, Tensor) and t.dim() for t in tensors):
        return None
    inputs = tuple((t.shape[1:], t.dtype, t.device) for t in tensors)
    return inputs, rulebook.kernel_size, rulebook.in_indices.device


def _rows_fit(features: Tensor, residual: Tensor | None, rulebook: Rulebook) -> bool:
    """Whether there is a row for each voxel, of which there are some."""
    outputs = rulebook.num_out
    added = outputs if residual is None else len(residual)
    return bool(0 < len(features) == rulebook.num_in and 0 < outputs == added)


def _accumulated(
    features: Tensor, weight: Tensor, bias: Tensor | None, rulebook: Rulebook, *, fits_int32: bool
) -> Tensor:
    """Sums ``[num_out, out_channels]`` by torch: blocks of gathered rows, one matrix product each.

    int32, or int64 where no bound shows that they fit; the weight is ``[volume, in, out]``.
    """
    volume, in_channels, out_channels = weight.shape
    dtype = torch.int32 if fits_int32 else torch.int64
    acc = torch.zeros((rulebook.num_out, out_channels), dtype=dtype, device=features.device)
    if features.shape[0] and in_channels and out_channels:
        padded = torch.cat([features.new_zeros(1, in_channels), features])
        matrix = weight.reshape(volume * in_channels, out_channels)
        block = max(1, _BLOCK_VALUES // (volume * in_channels))
        for start in range(0, rulebook.num_out, block):
            rows = rulebook.neighbours[start : start + block].long() + 1  # row 0 holds zeros
            columns = gathered(padded, rows.view(-1)).view(rows.shape[0], -1)
            acc[start : start + block] = exact_matmul(columns, matrix, fits_int32=fits_int32)
    return acc if bias is None else acc.add_(bias.to(dtype))


def _compiled(
    weight: Tensor,
    bias: Tensor | None,
    rulebook: Rulebook,
    layout: WeightLayout,
    output: Output,
    dtype: torch.dtype,
    kind: str,
) -> SparseLayer:
    from bevquant_int8sim._compiled.packed import pack_weight
    from bevquant_int8sim._compiled.sparse import SparseLayer

    if dtype == torch.int16:
        kind += "16"
    packed = remembered(
        weight,
        (kind, layout),
        lambda: pack_weight(_as_matrices(weight, rulebook, layout).numpy(), kind),
    )
    return SparseLayer(packed, None if bias is None else bias.numpy(), output)
