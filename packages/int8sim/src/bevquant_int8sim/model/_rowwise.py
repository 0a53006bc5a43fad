"""Quantization and sums of integers, by numba's one pass where it fits, else by torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bevquant_int8sim._backends import compiled_module
from bevquant_int8sim._quantize import dequantize, quantize, requantize
from bevquant_int8sim._rounding import round_float
from bevquant_int8sim._scales import along_axis, integer_range
from bevquant_sparse.runtime import workspace


def quantized(
    x: Tensor,
    scale: float,
    *,
    bits: int,
    narrow: bool,
    rounding: str = "half_even",
    name: str = "quantize",
) -> Tensor:
    """`quantize` with one scale."""
    fits = x.dtype == torch.float32 and bits <= 8 and rounding == "half_even"
    kernels = _kernels(x) if fits else None
    flat = _flat(x) if kernels is not None else None
    if kernels is None or flat is None:
        return quantize(x, scale, bits=bits, narrow_range=narrow, rounding=rounding, name=name)
    out = torch.empty_strided(x.shape, x.stride(), dtype=torch.int8)
    low, high = integer_range(bits, narrow)
    target = _flat(out)
    assert target is not None
    if not kernels.quantize_flat(flat.numpy(), scale, low, high, target.numpy()):
        raise ValueError(f"{name}: values contain NaN, which no integer stands for")
    return out


def requantized(
    acc: Tensor,
    multiplier: Tensor,
    axis: int,
    *,
    bits: int,
    narrow: bool,
    relu: bool,
    rounding: str = "half_even",
    arithmetic: str = "float64",
    name: str,
) -> Tensor:
    """`requantize` of accumulators, or of integers of another scale."""
    plain = bits <= 8 and (rounding, arithmetic) == ("half_even", "float64")
    kernels = _kernels(acc) if acc.dtype in (torch.int32, torch.int8) and plain else None
    axis = _packed_axis(acc) if multiplier.dim() == 0 else axis
    if kernels is None:
        return requantize(
            acc.to(torch.int32), multiplier, axis=axis, bits=bits, narrow_range=narrow,
            relu=relu, rounding=rounding, arithmetic=arithmetic, name=name,
        )  # fmt: skip
    low, high = integer_range(bits, narrow)
    out, shaped = _result(acc, axis, torch.int8)
    factors = _factors(multiplier, acc.shape[axis])
    kernels.requantize_rows(*_rows(acc, axis), factors, 0 if relu else low, high, out)
    return shaped


def dequantized(acc: Tensor, scale: Tensor, axis: int, *, relu: bool) -> Tensor:
    """`dequantize` to float32."""
    kernels = _kernels(acc) if acc.dtype in (torch.int32, torch.int8) else None
    axis = _packed_axis(acc) if scale.dim() == 0 else axis
    if kernels is None:
        values = dequantize(acc, scale, axis=axis)
        return values.clamp_(min=0) if relu else values
    out, shaped = _result(acc, axis, torch.float32)
    factors = _factors(scale, acc.shape[axis])
    kernels.dequantize_rows(*_rows(acc, axis), factors, 0.0 if relu else -math.inf, out)
    return shaped


def add(
    operands: list[Tensor], factors: list[Tensor], factor: float, axis: int, low: int, high: int
) -> Tensor:
    """``clamp(round((Σ q_i · factors_i) · factor))`` in float64, half to even.

    Operands are integers of at most 16 bits, or int32 accumulators. The size of `high` says whether
    the result is int8 or int16.
    """
    # The widest first, as the kernels read them; without kernels the sum has the same order.
    order = sorted(range(len(operands)), key=lambda i: -operands[i].element_size())
    first, *rest = (operands[i] for i in order)
    if not any(f.dim() for f in factors):
        axis = _packed_axis(first)
    kernels = _kernels(first) if len(rest) == 1 and high <= 127 else None
    if kernels is not None and rest[0].dtype == torch.int8 and first.dtype != torch.int16:
        if first.shape == rest[0].shape:
            out, shaped = _result(first, axis, torch.int8)
            fa, fb = (_factors(factors[i], first.shape[axis]) for i in order)
            a, b = _rows(first, axis), _rows(rest[0], axis)
            kernels.add_rows(*a, fa, *b, fb, factor, low, high, out)
            return shaped
    total = torch.zeros((), dtype=torch.float64)
    for i in order:
        scale = along_axis(factors[i], operands[i], axis, "add")
        total = total + operands[i].to(torch.float64) * scale
    dtype = torch.int8 if high <= 127 else torch.int16
    return round_float(total * factor, "half_even").clamp_(low, high).to(dtype)


def contiguous(x: Tensor) -> Tensor:
    """``x.contiguous()``, a few times as fast for maps that lie channels last on a CPU."""
    kernels = _kernels(x, "channels_last")
    return x.contiguous() if kernels is None else kernels.planes(x)


def _kernels(x: Tensor, name: str = "rowwise") -> Any:
    return compiled_module(name, x.numel()) if x.device.type == "cpu" else None


def _flat(x: Tensor) -> Tensor | None:
    """The memory of a tensor without gaps, in its own order."""
    if not torch.ops.aten.is_non_overlapping_and_dense(x):
        return None
    return x.as_strided((x.numel(),), (1,))


def _rows(x: Tensor, axis: int) -> tuple[Any, int]:
    """``(flat memory, stride of a row)`` with the channels of `axis` side by side."""
    moved = x.movedim(axis, -1)
    channels = moved.shape[-1]
    # The stride of a single channel has no meaning.
    if moved.stride(-1) != 1 and channels > 1:
        moved = moved.contiguous()
    try:
        rows = moved.view(-1, channels)
    except RuntimeError:
        rows = moved.contiguous().view(-1, channels)
    stride = rows.stride(0) if len(rows) > 1 else channels
    # Rows may be wider in memory than here: nothing is read past the last one's channels.
    length = (len(rows) - 1) * stride + channels
    return rows.as_strided((length,), (1,)).numpy(), stride


def _packed_axis(x: Tensor) -> int:
    """The axis whose entries lie side by side in memory."""
    return next((i for i in range(x.dim()) if x.stride(i) == 1 and x.shape[i] > 1), -1)


def _result(like: Tensor, axis: int, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """Rows to fill, and the tensor shaped as `like` that they are the memory of."""
    shape = like.movedim(axis, -1).shape
    kind = {torch.int8: "int8", torch.float32: "float32"}[dtype]
    rows = workspace.empty((math.prod(shape[:-1]), shape[-1]), kind)
    return rows, torch.from_numpy(rows).view(shape).movedim(-1, axis)


def _factors(values: Tensor, channels: int) -> Any:
    return values.to(torch.float64).expand(channels).contiguous().numpy()
