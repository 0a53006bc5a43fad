"""Computation of each kind of step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bevquant_int8sim._conv import (
    int8_conv1d,
    int8_conv2d,
    int8_conv3d,
    int8_conv_transpose2d,
    int8_linear,
)
from bevquant_int8sim._elementwise import rounded_sum
from bevquant_int8sim._prepared import without_lists
from bevquant_int8sim._quantize import dequantize, quantize, requantize
from bevquant_int8sim._rounding import round_float
from bevquant_int8sim._sample import attention_sums, grid_sums
from bevquant_int8sim._scales import integer_range
from bevquant_int8sim._sparse_conv import int8_sparse_conv
from bevquant_int8sim.model._coords import Coords, Geometry
from bevquant_int8sim.model._fast_program import sorted_coords
from bevquant_int8sim.model._grid_operations import average, average_pool
from bevquant_int8sim.model._program import Step
from bevquant_int8sim.model._rowwise import add, dequantized, quantized, requantized
from bevquant_sparse import WeightLayout

__all__ = ["DTYPES", "OPERATION_NAMES", "accumulators", "execute", "makes_accumulators"]

DTYPES = {
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "float32": torch.float32,
}


def execute(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], backend: str) -> Any:
    """The outputs of a step, as a tuple.

    Raises:
        ValueError: An operand does not fit, an accumulator overflows, NaN is to be quantized; the
            message names the step's module.
    """
    try:
        made = _OPERATIONS[step.op](step, args, kwargs, backend)
    except (ValueError, TypeError) as error:
        if step.op in ("float", "host", "operator") or str(error).startswith(
            step.path or "the model"
        ):
            raise
        raise type(error)(f"{step.path or 'the model'}: {error}") from error
    floor, ceiling = (step.attributes.get(name) for name in ("floor", "ceiling"))
    if floor is None and ceiling is None:
        return made
    return (made[0].clamp(floor, ceiling), *made[1:])


_BARE = {"out": "int32", "relu": False}


def makes_accumulators(step: Step) -> bool:
    """Whether a layer's step returns its accumulators."""
    changed = "multiplier" in step.tensors or "ceiling" in step.attributes
    return not changed and _BARE.items() <= step.attributes.items()


def accumulators(step: Step, args: tuple[Any, ...], backend: str) -> Tensor:
    """The int32 accumulators of a layer's step, before it requantizes them."""
    tensors = {name: t for name, t in step.tensors.items() if name != "multiplier"}
    bounds = ("floor", "ceiling")  # of what the step stores
    attributes = {n: value for n, value in step.attributes.items() if n not in bounds} | _BARE
    bare = Step(step.op, step.path, step.args, step.outputs, attributes=attributes, tensors=tensors)
    result: Tensor = execute(bare, args, {}, backend)[0]
    return result


def _quantize(step: Step, args: Any, kwargs: Any, backend: str) -> tuple[Tensor]:
    attributes = step.attributes
    bits, narrow = attributes["bits"], attributes["narrow"]
    name = step.path or "the model"
    if step.rounding:
        rounding, scale = attributes.get("rounding", "half_even"), attributes["scale"]
        q = quantize(args[0], scale, bits=bits, narrow_range=narrow, rounding=rounding, name=name)
    else:
        q = quantized(args[0], attributes["scale"], bits=bits, narrow=narrow, name=name)
    return (q.clamp_(min=0) if attributes["relu"] else q,)


def _requantize(step: Step, args: Any, kwargs: Any, backend: str) -> tuple[Tensor]:
    multiplier, attributes = step.tensors["multiplier"], step.attributes
    axis, bits, narrow = attributes["axis"], attributes["bits"], attributes["narrow"]
    relu, name = attributes["relu"], step.path
    if step.rounding:
        acc = args[0].to(torch.int32)
        q = requantize(
            acc, multiplier, axis=axis, bits=bits, narrow_range=narrow, relu=relu, name=name,
            **step.rounding,
        )  # fmt: skip
    else:
        q = requantized(args[0], multiplier, axis, bits=bits, narrow=narrow, relu=relu, name=name)
    return (q,)


def _dequantize(step: Step, args: Any, kwargs: Any, backend: str) -> tuple[Tensor]:
    attributes = step.attributes
    scale = step.tensors["scale"]
    return (dequantized(args[0], scale, attributes["axis"], relu=attributes["relu"]),)


def _relu(step: Step, args: Any, kwargs: Any, backend: str) -> tuple[Tensor]:
    return (args[0].clamp(min=0),)


def _add(step: Step, args: Any, kwargs: Any, backend: str) -> tuple[Tensor]:
    """Operands of one scale: round((Σ q)·s/s_y); of several: round(Σ q_i·(s_i/s_y))."""
    attributes, axis = step.attributes, step.attributes["axis"]
    scales = [step.tensors[f"scale{i}"] for i in range(len(args))]
    if attributes["out"] == "float32":
        values = torch.zeros((), dtype=torch.float64)
        for operand, scale in zip(args, scales, strict=True):
            values = values + dequantize(operand, scale, axis=axis, dtype=torch.float64)
        return ((values.clamp_(min=0) if attributes["relu"] else values).float(),)
    low, high = integer_range(attributes["bits"], attributes["narrow"])
    low = 0 if attributes["relu"] else low
    if step.rounding:
        factors = [scale / attributes["scale"] for scale in scales]
        q = rounded_sum(args, factors, axis, name=step.path, **step.rounding)
        return (q.clamp_(low, high).to(DTYPES[attributes["out"]]),)
    if all(s.dim() == 0 and float(s) == float(scales[0]) for s in scales):
        ones = [torch.ones((), dtype=torch.float64)] * len(args)
        factor = float(scales[0] / attributes["scale"])
        return (add(list(args), ones, factor, axis, low, high),)
    factors = [scale / attributes["scale"] for scale in scales]
    return (add(list(args), factors, 1.0, axis, low, high),)


def _sorted_coords(step: Step, args: Any, kwargs: Any, backend: str) -> tuple[Any, ...]:
    return sorted_coords(*args)


def _avg_pool(step: Step, args: Any, kwargs: Any, backend: str) -> tuple[Tensor]:
    attributes = step.attributes
    if attributes["out"] == "float32":
        values = average(args[0].double(), **kwargs) * attributes["scale"]
        return ((values.clamp_(min=0) if attributes["relu"] else values).float(),)
    dtype = DTYPES[attributes["out"]]
    rounding = attributes.get("rounding", "half_even")
    if dtype == args[0].dtype:
        q = average_pool(args[0], attributes["multiplier"], rounding=rounding, **kwargs)
    else:
        values = average(args[0].double(), **kwargs) * attributes["multiplier"]
        q = round_float(values, rounding)
    low = 0 if attributes["relu"] else attributes["low"]
    return (q.clamp_(low, attributes["high"]).to(dtype),)


def _sample(step: Step, args: Any, kwargs: Any, backend: str) -> tuple[Tensor]:
    attributes, name = step.attributes, step.path or "the model"
    if step.op == "grid_sample":
        sums, bits = grid_sums(*args, **kwargs, name=name)
    else:
        sums, bits = attention_sums(*args, name=name)
    relu = attributes["relu"]
    if attributes["out"] == "float32":
        scale = torch.tensor(attributes["scale"] / 2**bits, dtype=torch.float64)
        return (dequantized(sums, scale, -1, relu=relu),)
    bits_out = 8 if attributes["out"] == "int8" else 16
    factor = attributes["multiplier"] / 2**bits
    q = requantize(sums, factor, bits=bits_out, relu=relu, name=name, **step.rounding)
    return (q.clamp_(attributes["low"], attributes["high"]),)


def _coords(step: Step, args: Any, kwargs: Any, backend: str) -> tuple[Coords]:
    indices, spatial_shape, batch_size = args
    return (Coords(indices, spatial_shape, batch_size),)


def _sparse_conv(step: Step, args: Any, kwargs: Any, backend: str) -> tuple[Tensor, Coords]:
    features, coords, *residual = args
    attributes = step.attributes
    rulebook, out_coords = coords.convolved(geometry(step), attributes["indice_key"], step.path)
    out = int8_sparse_conv(
        features,
        step.tensors["weight"],
        step.tensors.get("bias"),
        rulebook,
        layout=WeightLayout.VCK,
        multiplier=step.tensors.get("multiplier"),
        residual=residual[0] if residual else None,
        sum_multiplier=attributes.get("sum_multiplier", 1.0),
        relu=attributes["relu"],
        out_dtype=DTYPES[attributes["out"]],
        narrow_range=attributes["narrow"],
        backend=backend,
        name=step.path,
        **step.rounding,
    )
    return out, out_coords


def _dense(step: Step, args: Any, kwargs: Any, backend: str) -> tuple[Tensor]:
    tensors = step.tensors
    weight, settings = tensors["weight"], step.kept(_dense_settings)
    if len(args) > 1:
        if tuple(args[1].shape) != _result_shape(step, args[0]):
            return _sum_that_spreads(step, args, backend)
        multiplier = step.attributes["addend_multiplier"]
        settings = {**settings, "addend": args[1], "addend_multiplier": multiplier}
    out = _KERNELS[step.op, weight.dim()](
        args[0],
        weight,
        tensors.get("bias"),
        multiplier=tensors.get("multiplier"),
        backend=backend,
        **settings,
    )
    return (out,)


def _dense_settings(step: Step) -> dict[str, Any]:
    """Arguments of a layer's kernel beside tensors."""
    attributes = step.attributes
    names = "stride padding output_padding dilation groups".split()
    return {
        "relu": attributes["relu"],
        "out_dtype": DTYPES[attributes["out"]],
        "narrow_range": attributes["narrow"],
        "name": step.path,
        **{name: without_lists(attributes[name]) for name in names if name in attributes},
        **step.rounding,
    }


def _result_shape(step: Step, x: Tensor) -> tuple[int, ...]:
    """Of a convolution."""
    attributes, weight = step.attributes, step.tensors["weight"]
    sides = zip(
        x.shape[2:], weight.shape[2:],
        attributes["stride"], attributes["padding"], attributes["dilation"], strict=True,
    )  # fmt: skip
    grid = ((n + sum(pad) - d * (k - 1) - 1) // stride + 1 for n, k, stride, pad, d in sides)
    return (len(x), weight.shape[0], *grid)


def _sum_that_spreads(step: Step, args: Any, backend: str) -> tuple[Tensor]:
    """A convolution's sums and its addend where one of the two is spread over the other."""
    attributes = step.attributes
    added = torch.tensor(attributes["addend_multiplier"], dtype=torch.float64)
    low, high = integer_range(8, attributes["narrow"])
    factors = [step.tensors["multiplier"], added]
    operands = [accumulators(step, args[:1], backend), args[1]]
    low, axis = 0 if attributes["relu"] else low, attributes["channel_axis"]
    return (add(operands, factors, 1.0, axis, low, high),)


_KERNELS: dict[tuple[str, int], Callable[..., Tensor]] = {
    ("linear", 2): int8_linear,
    ("conv", 3): int8_conv1d,
    ("conv", 4): int8_conv2d,
    ("conv", 5): int8_conv3d,
    ("conv_transpose", 4): int8_conv_transpose2d,
}


def geometry(step: Step) -> Geometry:
    """Settings of a sparse convolution's step."""
    names = "kernel_size stride padding dilation output_padding".split()
    settings: dict[str, Any] = {name: tuple(step.attributes[name]) for name in names}
    settings |= {name: step.attributes[name] for name in ("subm", "transposed", "inverse")}
    return Geometry(**settings)


def _constant(step: Step, args: Any, kwargs: Any, backend: str) -> tuple[Tensor]:
    return (step.tensors["value"],)


def _call(step: Step, args: Any, kwargs: Any, backend: str) -> tuple[Any, ...]:
    function: Any = step.module if step.function is None else step.function
    if step.attributes.get("what") == "as_strided":  # counts in memory, where pixels lie otherwise
        args = (args[0].contiguous(), *args[1:])
    result = function(*args, **kwargs)
    if len(step.outputs) == 1:
        return (result,)
    if not isinstance(result, list | tuple) or len(result) != len(step.outputs):
        where, came = step.path or "the model", type(result).__name__
        raise ValueError(f"{where}: expected {len(step.outputs)} values, its call gives a {came}")
    return tuple(result)


def _operator(step: Step, args: Any, kwargs: Any, backend: str) -> tuple[Any, ...]:
    """An operator of torch; its inputs are in `kwargs`, its constants in the attributes."""
    operator: Any = step.function
    # By position where the schema has it so: torch's parser takes numbers as tensors there alone.
    positional: list[Any] = []
    named = {**kwargs, **step.attributes}
    for argument in operator._schema.arguments:
        if argument.kwarg_only or argument.name not in named:
            break
        positional.append(named.pop(argument.name))
    result = operator(*positional, **named)
    return (result,) if isinstance(result, Tensor) else tuple(result)


_OPERATIONS: dict[str, Callable[[Step, Any, Any, str], Any]] = {
    "add": _add,
    "avg_pool": _avg_pool,
    "conv": _dense,
    "conv_transpose": _dense,
    "constant": _constant,
    "deformable_attention": _sample,
    "dequantize": _dequantize,
    "float": _call,
    "grid_sample": _sample,
    "host": _call,
    "linear": _dense,
    "max_pool": _call,
    "move": _call,
    "operator": _operator,
    "quantize": _quantize,
    "relu": _relu,
    "resize": _call,
    "requantize": _requantize,
    "sites": _coords,
    "sorted_sites": _sorted_coords,
    "sparse_conv": _sparse_conv,
}

#: Every operation that a step may have.
OPERATION_NAMES = frozenset(_OPERATIONS)
