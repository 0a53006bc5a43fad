"""Functions registered with torch, and the integer operations that fixed-point modules call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

import bevquant_int8sim as int8sim

_NAMESPACE = "bevquant_hybrid"
Function = TypeVar("Function", bound=Callable[..., Any])

# Spelled as in torch's schemas: torch's own inference turns integers into symbolic sizes.
_TYPES = {
    **{name: name for name in ("Tensor", "int", "float", "bool", "str")},
    **{f"Sequence[{name}]": f"{name}[]" for name in ("Tensor", "int", "float")},
    **{"tuple[Tensor, Tensor]": "(Tensor, Tensor)", "list[Tensor]": "Tensor[]"},
}


def operator(function: Function, name: str = "") -> Function:
    """Register a function as ``torch.ops.bevquant_hybrid.<its name>`` and return that operator."""
    # Postponed annotations are strings, and so the schema.
    kinds = {name: _schema_of(kind) for name, kind in function.__annotations__.items()}
    result = kinds.pop("return")
    schema = f"({', '.join(f'{kind} {argument}' for argument, kind in kinds.items())}) -> {result}"
    name = name or function.__name__.lstrip("_")
    made = torch.library.custom_op(
        f"{_NAMESPACE}::{name}", function, mutates_args=(), schema=schema
    )
    # The operator itself, not its wrapper: torch.jit.trace records calls of this one.
    found = getattr(getattr(torch.ops, _NAMESPACE), name).default
    found.__doc__ = made.__doc__ = function.__doc__
    return cast(Function, found)


def keep_settings(module: Any, given: Mapping[str, Any]) -> None:
    """Set the arguments of a module's constructor (its ``locals()``) as attributes."""
    vars(module).update({n: value for n, value in given.items() if n not in ("self", "__class__")})


def settings_of(module: Any, operator: Any) -> dict[str, Any]:
    """The arguments of an operator that a module holds as attributes."""
    names = (argument.name for argument in operator._schema.arguments)
    return {name: getattr(module, name) for name in names if hasattr(module, name)}


def _schema_of(annotation: str) -> str:
    plain = annotation.removesuffix(" | None")
    return _TYPES[plain] + "?" * (plain != annotation)


_STORAGE = {8: torch.int8, 16: torch.int16, 32: torch.int32}


@operator
def quantize(x: Tensor, scale: Tensor, axis: int, bits: int, rounding: str) -> Tensor:
    """clamp(round(x / scale)) in float64, as int8, int16 or int32."""
    factor = scale if axis >= 0 else scale.reshape(())
    return int8sim.quantize(x, factor, axis=max(axis, 0), bits=bits, rounding=rounding)


@operator
def dequantize(x: Tensor, scale: Tensor, axis: int) -> Tensor:
    """Integers times scale, as float32; a scale shaped like `x` is per element."""
    if scale.dim() > 1:
        return (x.double() * scale).float()
    factor = scale if axis >= 0 else scale.reshape(())
    return int8sim.dequantize(x, factor, axis=max(axis, 0))


@operator
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
    """int32 accumulators of a convolution of any rank, or a transposed 2-D convolution."""
    run: Callable[..., Tensor] = int8sim.int8_conv_transpose2d
    settings: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    if transposed:
        settings["output_padding"] = output_padding
    else:
        run = {3: int8sim.int8_conv1d, 4: int8sim.int8_conv2d, 5: int8sim.int8_conv3d}[weight.dim()]
    return run(x, weight, bias, groups=groups, name=name, **settings)


@operator
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """int32 accumulators of a fully connected layer."""
    return int8sim.int8_linear(x, weight, bias, name=name)


@operator
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


@operator
def add(
    a: Tensor,
    b: Tensor,
    multiplier_a: Tensor,
    multiplier_b: Tensor,
    bits: int,
    rounding: str,
    name: str,
) -> Tensor:
    """clamp(round(a·Ma + b·Mb)), rounded once; shapes broadcast, 8 and 16 bits may be mixed."""
    # One type that holds both operands and the result: int8sim takes no mixed ones.
    width = torch.promote_types(torch.promote_types(a.dtype, b.dtype), _STORAGE[bits])
    left, right = torch.broadcast_tensors(a.to(width), b.to(width))
    factors = float(multiplier_a), float(multiplier_b)
    return _narrow(int8sim.int8_add(left, right, *factors, rounding=rounding, name=name), bits)


@operator
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


@operator
def multiply(a: Tensor, b: Tensor, name: str) -> Tensor:
    """int32 products; shapes broadcast."""
    # 16 bits times 16 bits always fit.
    return a.to(torch.int32) * b.to(torch.int32)


@operator
def matmul(a: Tensor, b: Tensor, name: str) -> Tensor:
    """int32 accumulators of a matrix product, batched."""
    # In int64: a sum that leaves int32 is refused, not wrapped.
    acc = torch.matmul(a.to(torch.int64), b.to(torch.int64))
    if acc.numel() and int(acc.abs().max()) >= 2**31:
        raise int8sim.AccumulatorOverflowError(f"{name}: a sum of the product leaves int32")
    return acc.to(torch.int32)


@operator
def concat(
    tensors: Sequence[Tensor],
    multipliers: Sequence[Tensor],
    axis: int,
    bits: int,
    rounding: str,
    name: str,
) -> Tensor:
    """Concatenate, each tensor requantized by its multiplier (1: unchanged)."""
    widest = functools.reduce(torch.promote_types, (t.dtype for t in tensors), _STORAGE[bits])
    parts = [tensor.to(widest) for tensor in tensors]
    factors = [float(multiplier) for multiplier in multipliers]
    joined = int8sim.int8_concat(parts, factors, axis, rounding=rounding, name=name)
    return _narrow(joined, bits)


@operator
def lookup(x: Tensor, table: Tensor, name: str) -> Tensor:
    """``table[x + 128]`` of int8, ``table[x + 32768]`` of int16."""
    if x.dtype == torch.int8:
        return int8sim.int8_lookup(x, table, name=name)
    # int8sim has tables of 256 entries.
    return table[x.long() + 2**15]


@operator
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


@operator
def max_pool(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    """Maximum over windows of two axes; the scale stays."""
    return int8sim.int8_max_pool(x, kernel_size, stride, padding, dilation, ceil_mode=ceil_mode)


@operator
def resize(
    x: Tensor,
    size: Sequence[int],
    scale_factor: Sequence[float],
    mode: str,
    align_corners: bool,
    rounding: str,
) -> Tensor:
    """Resize height and width; `size` or `scale_factor` is empty."""
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
    """Return an integer twice, or a pair unchanged."""
    return [value, value] if isinstance(value, int) else [int(v) for v in value]


@operator
def divide(x: Tensor, y: Tensor, scale_x: Tensor, scale_y: Tensor) -> Tensor:
    """x·s_x / (y·s_y) in float64; x/0 is infinite with x's sign, 0/0 is 0."""
    ratio = (x.double() * scale_x.double()) / (y.double() * scale_y.double())
    return ratio.nan_to_num(0.0, torch.inf, -torch.inf)


@operator
def gate(x: Tensor, scale: Tensor, dim: int) -> Tensor:
    """a·σ(b) of the halves a and b of x·s along an axis, in float64."""
    return F.glu(x.double() * scale.double(), dim)


def filled(x: Tensor, excluded: Tensor, lowest: bool, dim: int | None) -> Tensor:
    """The tensor with its smallest value, or 0, where a mask is True.

    With `dim`, rows along it whose mask is all True stay unchanged.
    """
    where = excluded if dim is None else excluded & ~excluded.all(dim, keepdim=True)
    return x.masked_fill(where, x.detach().amin() if lowest and x.numel() else 0)


@operator
def exclude(x: Tensor, excluded: Tensor, lowest: bool, dim: int | None) -> Tensor:
    """`filled` of integers."""
    return filled(x, excluded, lowest, dim)


@operator
def split_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions where a float mask is −∞, and the mask with 0 there."""
    excluded = mask.isneginf()
    return excluded, mask.masked_fill(excluded, 0.0)


@operator
def quantize_bias(bias: Tensor, input_scale: Tensor, weight_scale: Tensor, name: str) -> Tensor:
    """round(b / (s_x·s_w)) as int32, half to even."""
    step = weight_scale if weight_scale.numel() > 1 else weight_scale.reshape(())
    return int8sim.quantize_bias(bias, input_scale.reshape(()), step, name=name)


@operator
def accumulate(
    acc: Tensor, other: Tensor, multiplier: Tensor, axis: int, rounding: str, name: str
) -> Tensor:
    """Acc + round(other · multiplier): adds the second input at the accumulator's scale."""
    factor = multiplier.double()
    if factor.numel() > 1:
        shape = [1] * acc.dim()
        shape[axis] = -1
        factor = factor.reshape(shape)
    aligned = other.double() * factor
    aligned = torch.floor(aligned + 0.5) if rounding == "half_up" else aligned.round()
    total = acc.long() + aligned.long()
    if total.numel() and int(total.abs().max()) >= 2**31:
        raise int8sim.AccumulatorOverflowError(
            f"{name}: its accumulator and the second input together leave int32"
        )
    return total.to(torch.int32)


@operator
def sum_over(x: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    """Exact sum over axes, int64."""
    return x.to(torch.int64).sum(list(dim), keepdim=keepdim)
