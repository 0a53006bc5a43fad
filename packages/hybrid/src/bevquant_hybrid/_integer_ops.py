"""Integer arithmetic of converted models, as operators of torch.

Each is registered as ``torch.ops.bevquant_hybrid.…``, so that a traced model names what it
computes, and runs on the kernels of bevquant_int8sim. A tie is rounded up (⌊v + ½⌋) unless said
otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

import bevquant_int8sim as int8sim
from bevquant_hybrid._torch_operator import operator
from bevquant_hybrid.dtype import qinfo

if TYPE_CHECKING:
    from bevquant_hybrid.qtensor import QTensor

_STORAGE = {8: torch.int8, 16: torch.int16, 32: torch.int32}

__all__ = [
    "add",
    "avg_pool",
    "clamp",
    "concat",
    "conv",
    "dequantize",
    "linear",
    "lookup",
    "matmul",
    "max_pool",
    "multiply",
    "pad",
    "quantize",
    "requantize",
    "resize",
    "subtract",
]


@operator("(Tensor x, Tensor scale, int axis, int bits, str rounding) -> Tensor")
def quantize(x: Tensor, scale: Tensor, axis: int, bits: int, rounding: str) -> Tensor:
    """clamp(round(x / scale)) in float64, as int8, int16 or int32."""
    factor = scale if axis >= 0 else scale.reshape(())
    return int8sim.quantize(x, factor, axis=max(axis, 0), bits=bits, rounding=rounding)


@operator("(Tensor x, Tensor scale, int axis) -> Tensor")
def dequantize(x: Tensor, scale: Tensor, axis: int) -> Tensor:
    """Integers times scale, as float32. A scale shaped as `x` holds one for each element."""
    if scale.dim() > 1:
        return (x.double() * scale).float()
    factor = scale if axis >= 0 else scale.reshape(())
    return int8sim.dequantize(x, factor, axis=max(axis, 0))


@operator(
    "(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
    "int groups, bool transposed, int[] output_padding, str name) -> Tensor"
)
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    transposed: bool,
    output_padding: Sequence[int],
    name: str,
) -> Tensor:
    """int32 accumulators of a convolution of any rank, transposed in two dimensions."""
    if transposed:
        return int8sim.int8_conv_transpose2d(
            x,
            weight,
            bias,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            dilation=dilation,
            groups=groups,
            name=name,
        )
    run = {3: int8sim.int8_conv1d, 4: int8sim.int8_conv2d, 5: int8sim.int8_conv3d}[weight.dim()]
    return run(
        x,
        weight,
        bias,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        name=name,
    )


@operator("(Tensor x, Tensor weight, Tensor? bias, str name) -> Tensor")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """int32 accumulators of a fully connected layer."""
    return int8sim.int8_linear(x, weight, bias, name=name)


@operator(
    "(Tensor acc, Tensor multiplier, int axis, int bits, int low, int high, str rounding, "
    "str name) -> Tensor"
)
def requantize(
    acc: Tensor,
    multiplier: Tensor,
    axis: int,
    bits: int,
    low: int,
    high: int,
    rounding: str,
    name: str,
) -> Tensor:
    """clamp(round(acc · multiplier), low, high)."""
    factor = multiplier.reshape(()) if multiplier.numel() == 1 else multiplier
    q = int8sim.requantize(acc, factor, axis=axis, bits=bits, rounding=rounding, name=name)
    return q.clamp_(low, high)


@operator(
    "(Tensor a, Tensor b, Tensor multiplier_a, Tensor multiplier_b, int bits, str rounding, "
    "str name) -> Tensor"
)
def add(
    a: Tensor,
    b: Tensor,
    multiplier_a: Tensor,
    multiplier_b: Tensor,
    bits: int,
    rounding: str,
    name: str,
) -> Tensor:
    """clamp(round(a·Ma + b·Mb)), rounded once; shapes broadcast, and 8 and 16 bits may meet."""
    width = torch.promote_types(torch.promote_types(a.dtype, b.dtype), _STORAGE[bits])
    left, right = torch.broadcast_tensors(a.to(width), b.to(width))  # type: ignore[no-untyped-call]
    factors = float(multiplier_a), float(multiplier_b)
    return _narrow(int8sim.int8_add(left, right, *factors, rounding=rounding, name=name), bits)


@operator(
    "(Tensor a, Tensor b, Tensor multiplier_a, Tensor multiplier_b, int bits, str rounding, "
    "str name) -> Tensor"
)
def subtract(
    a: Tensor,
    b: Tensor,
    multiplier_a: Tensor,
    multiplier_b: Tensor,
    bits: int,
    rounding: str,
    name: str,
) -> Tensor:
    """clamp(round(a·Ma − b·Mb)), in float64 and rounded once; shapes broadcast."""
    # int8_add takes positive multipliers, and −(−128) is no int8.
    difference = a.double() * float(multiplier_a) - b.double() * float(multiplier_b)
    return int8sim.quantize(difference, 1.0, bits=bits, rounding=rounding)


@operator("(Tensor a, Tensor b, str name) -> Tensor")
def multiply(a: Tensor, b: Tensor, name: str) -> Tensor:
    """int32 products; shapes broadcast. 16 bits times 16 bits always fit."""
    return a.to(torch.int32) * b.to(torch.int32)


@operator("(Tensor a, Tensor b, str name) -> Tensor")
def matmul(a: Tensor, b: Tensor, name: str) -> Tensor:
    """int32 accumulators of a matrix product, batched.

    Raises:
        AccumulatorOverflowError: A sum leaves int32.
    """
    acc = torch.matmul(a.to(torch.int64), b.to(torch.int64))
    if acc.numel() and int(acc.abs().max()) >= 2**31:
        raise int8sim.AccumulatorOverflowError(f"{name}: a sum of the product leaves int32")
    return acc.to(torch.int32)


@operator(
    "(Tensor[] tensors, Tensor[] multipliers, int axis, int bits, str rounding, str name) -> Tensor"
)
def concat(
    tensors: Sequence[Tensor],
    multipliers: Sequence[Tensor],
    axis: int,
    bits: int,
    rounding: str,
    name: str,
) -> Tensor:
    """Concatenate, each tensor requantized by its multiplier; 1 leaves it as it is."""
    widest = functools.reduce(torch.promote_types, (t.dtype for t in tensors), _STORAGE[bits])
    parts = [tensor.to(widest) for tensor in tensors]
    factors = [float(multiplier) for multiplier in multipliers]
    joined = int8sim.int8_concat(parts, factors, axis, rounding=rounding, name=name)
    return _narrow(joined, bits)


@operator("(Tensor x, Tensor table, str name) -> Tensor")
def lookup(x: Tensor, table: Tensor, name: str) -> Tensor:
    """``table[x + 128]`` of int8, ``table[x + 32768]`` of int16."""
    if x.dtype == torch.int8:
        return int8sim.int8_lookup(x, table, name=name)
    return table[x.long() + 2**15]


@operator(
    "(Tensor x, int[] kernel_size, int[] stride, int[] padding, Tensor multiplier, bool ceil_mode, "
    "bool count_include_pad, str rounding, str name) -> Tensor"
)
def avg_pool(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    multiplier: Tensor,
    ceil_mode: bool,
    count_include_pad: bool,
    rounding: str,
    name: str,
) -> Tensor:
    """clamp(round(Σx·M / n))."""
    return int8sim.int8_avg_pool(
        x,
        kernel_size,
        stride,
        padding,
        float(multiplier),
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        rounding=rounding,
        name=name,
    )


@operator(
    "(Tensor x, int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool ceil_mode) "
    "-> Tensor"
)
def _max_pool(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    return int8sim.int8_max_pool(x, kernel_size, stride, padding, dilation, ceil_mode=ceil_mode)


@operator(
    "(Tensor x, int[] size, float[] scale_factor, str mode, bool align_corners, str rounding) "
    "-> Tensor"
)
def _resize(
    x: Tensor,
    size: Sequence[int],
    scale_factor: Sequence[float],
    mode: str,
    align_corners: bool,
    rounding: str,
) -> Tensor:
    return int8sim.int8_resize(
        x,
        size or None,
        scale_factor=scale_factor or None,
        mode=mode,
        align_corners=align_corners,
        rounding=rounding,
    )


def _narrow(q: Tensor, bits: int) -> Tensor:
    """Saturate at the range of `bits`."""
    info = torch.iinfo(_STORAGE[bits])
    return q.clamp(info.min, info.max).to(_STORAGE[bits])


def pair(value: int | Sequence[int]) -> list[int]:
    """One integer twice, or the two given."""
    return [value, value] if isinstance(value, int) else [int(v) for v in value]


def max_pool(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Maximum over windows; the scale stays."""
    steps = kernel_size if stride is None or stride == [] else stride
    return _max_pool(x, pair(kernel_size), pair(steps), pair(padding), pair(dilation), ceil_mode)


def resize(
    x: QTensor,
    size: int | Sequence[int] | None,
    scale_factor: float | Sequence[float] | None,
    mode: str,
    align_corners: bool,
) -> QTensor:
    """Resize height and width; the result lies on the grid of the input's scale."""
    from bevquant_hybrid._fake_quant._function import fake_quantize
    from bevquant_hybrid.qtensor import payload

    if mode not in ("nearest", "bilinear"):
        raise NotImplementedError(
            f"interpolate(mode={mode!r}): a BPU resizes by 'nearest' or 'bilinear'"
        )
    values = payload(x)
    if x.holds_integers:
        factors = scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * 2
        given = [] if scale_factor is None else [float(f) for f in factors if f is not None]
        sizes = [] if size is None else pair(size)
        return x.like(_resize(values, sizes, given, mode, align_corners, x.rounding))
    resized = F.interpolate(
        values,
        size,
        scale_factor,
        mode,
        align_corners if mode == "bilinear" else None,
    )
    if not x.on_grid:
        return x.like(resized)
    info = qinfo(x.dtype)
    return x.like(fake_quantize(resized, x.scale, -1, info.min, info.max))


def clamp(x: QTensor, low: float | None, high: float | None) -> QTensor:
    """Clamp to the steps nearest to the bounds."""
    from bevquant_hybrid.qtensor import along, payload

    if not x.on_grid:
        return x.like(payload(x).clamp(low, high))
    scale = along(x.scale, x.dim(), x.q_per_channel_axis()).double()
    info = qinfo(x.dtype)
    values = payload(x)
    for bound, cut in ((low, torch.maximum), (high, torch.minimum)):
        if bound is None:
            continue
        steps = torch.floor(bound / scale + 0.5).clamp(info.min, info.max)
        limit = steps if x.holds_integers else steps * scale
        values = cut(values, limit.to(values.dtype).to(values.device))
    return x.like(values)


def pad(x: QTensor, sides: Sequence[int], mode: str, value: float) -> QTensor:
    """Pad; a constant is rounded to the nearest step.

    Raises:
        NotImplementedError: Another mode than constant and replicate.
    """
    from bevquant_hybrid.qtensor import payload

    if mode not in ("constant", "replicate"):
        raise NotImplementedError(f"pad(mode={mode!r}): a BPU pads by 'constant' or 'replicate'")
    if mode == "replicate":
        values = payload(x)
        widened = values.double() if x.holds_integers else values
        return x.like(F.pad(widened, list(sides), mode).to(values.dtype))
    filler = clamp(x.like(torch.zeros_like(payload(x))), value, value) if value else None
    constant = float(payload(filler).reshape(-1)[0]) if filler is not None else 0.0
    return x.like(F.pad(payload(x), list(sides), value=constant))
