"""Whether a program that was read from a file can run: operations, types, shapes, order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta, Struct
from torch import Tensor

from bevquant_int8sim._rounding import Rounding
from bevquant_int8sim._sample import SAMPLES
from bevquant_int8sim.model._execute import OPERATION_NAMES
from bevquant_int8sim.model._form import Form, Integers
from bevquant_int8sim.model._program import Program, Ref, Step, names_in
from bevquant_quantizers.documents import Size, as_form

_RANKS = {"sparse_conv": (3,), "linear": (2,), "conv": (3, 4, 5), "conv_transpose": (4,)}

Positive = Annotated[float, Meta(gt=0, le=1.7976931348623157e308)]
Axis = Annotated[int, Meta(ge=-8, le=7)]
Extent = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Extents = Extent | tuple[Extent, ...]
Bits = Annotated[int, Meta(ge=2, le=16)]
Out = Literal["int8", "int16", "int32", "float32"]


class _Any(Struct, kw_only=True):
    """Attributes of every step, as it writes them; more of them are passed over."""

    what: str = ""
    floor: int | None = None
    ceiling: float | None = None
    rounding: Rounding = "half_even"
    arithmetic: Literal["float64", "fixed_point"] = "float64"


class _Limited(_Any, kw_only=True):
    relu: bool
    axis: Axis = -1


class _Add(_Limited, kw_only=True):
    axis: Axis
    out: Out
    scale: Positive | None = None
    bits: Bits | None = None
    narrow: bool | None = None


class _Average(_Limited, kw_only=True):
    scale: Positive
    out: Out
    multiplier: Positive | None = None
    low: int | None = None
    high: int | None = None


class _Dequantize(_Limited, kw_only=True):
    axis: Axis


class _Quantize(_Limited, kw_only=True):
    scale: Positive
    bits: Bits
    narrow: bool


class _Requantize(_Limited, kw_only=True):
    axis: Axis
    bits: Bits
    narrow: bool


class _Linear(_Any, kw_only=True):
    relu: bool
    out: Out
    narrow: bool
    channel_axis: Axis = -1
    addend_multiplier: Positive | None = None


class _Conv(_Linear, kw_only=True):
    stride: Extents
    padding: Any  # a size, or for each axis a size or a pair; see `_check_padding`
    dilation: Extents
    groups: Extent


class _ConvTranspose(_Conv, kw_only=True):
    output_padding: Size | tuple[Size, ...]


class _Sparse(_Linear, kw_only=True):
    indice_key: str | None
    kernel_size: tuple[Extent, ...]
    stride: tuple[Extent, ...]
    padding: tuple[Size, ...]
    dilation: tuple[Extent, ...]
    output_padding: tuple[Size, ...]
    subm: bool
    transposed: bool
    inverse: bool
    sum_multiplier: Positive | None = None


_BLENDS = ("avg_pool", *SAMPLES)
_ATTRIBUTES: dict[str, type[Struct]] = {
    "add": _Add,
    **dict.fromkeys(_BLENDS, _Average),
    "conv": _Conv,
    "conv_transpose": _ConvTranspose,
    "dequantize": _Dequantize,
    "linear": _Linear,
    "quantize": _Quantize,
    "relu": _Limited,
    "requantize": _Requantize,
    "sparse_conv": _Sparse,
}
# Values that an operation reads and makes; what calls a function may have any.
_READS = {
    "add": (1, 64), "avg_pool": (1, 1), "constant": (0, 0), "conv": (1, 2),
    "conv_transpose": (1, 2), "deformable_attention": (5, 5), "dequantize": (1, 1),
    "grid_sample": (2, 2), "linear": (1, 2), "quantize": (1, 1),
    "relu": (1, 1), "requantize": (1, 1), "sites": (3, 3), "sorted_sites": (3, 3),
    "sparse_conv": (2, 3),
}  # fmt: skip
_MAKES = {"sparse_conv": 2, "sorted_sites": 2}

_LARGEST_STEP = 1024  # of a layer; kernels take a time that grows with it


def validate(program: Program) -> None:
    """Check every step.

    Raises:
        ValueError: The first thing that does not fit; the step's module is named.
    """
    known = set(names_in(program.signature)) | set(program.sparse_inputs.values())
    known |= set(program.constants)
    program.members.refuse_misplaced(program.signature, program.result)
    for name, value in program.values.items():
        if isinstance(value.form, Integers):
            _check_form(name, value.form)
    for step in program.steps:
        path = step.path or "the model"
        missing = [name for name in step.inputs if name not in known]
        if missing:
            raise ValueError(f"{path}: {step.op} reads {missing[0]!r}, which no step made before")
        if step.op not in OPERATION_NAMES:
            raise ValueError(f"{path}: unknown operation {step.op!r}")
        as_form(
            dict(step.attributes),
            _ATTRIBUTES.get(step.op, _Any),
            where=f"{path}: what it says of itself",
            what=f"step {step.op!r}",
        )
        _check_call(step, path)
        if step.op in _RANKS:
            _check_layer(step, path)
        _check_factors(step, path)
        again = [name for name in step.outputs if name in known]
        if again and step.op == "operator":
            raise ValueError(f"{path}: {step.op} makes {again[0]!r}, which is there already")
        unknown = [name for name in step.outputs if name not in program.values]
        if unknown:
            raise ValueError(f"{path}: nothing is said about its output {unknown[0]!r}")
        _check_output(step, program.values[step.outputs[0]].form, path)
        known.update(step.outputs)
    missing = [name for name in names_in(program.result) if name not in known]
    if missing:
        raise ValueError(f"the result {missing[0]!r} is made by no step")


def _check_call(step: Step, path: str) -> None:
    """Check the number of inputs and outputs, and the called function."""
    low, high = _READS.get(step.op, (0, 0))
    if step.op in _READS:
        if not low <= len(step.args) <= high or (step.kwargs and step.op not in _BLENDS):
            raise ValueError(
                f"{path}: {step.op} takes {low} to {high} values, got {len(step.args)} and "
                f"{len(step.kwargs)} by name"
            )
        tensors = step.args[:2] if step.op == "sparse_conv" else step.args[:1]
        if step.op == "add":
            tensors = step.args
        if not all(isinstance(value, Ref) for value in tensors):
            raise ValueError(f"{path}: {step.op} takes values, got constants")
        if len(step.outputs) != _MAKES.get(step.op, 1):
            raise ValueError(f"{path}: {step.op} makes {len(step.outputs)} values")
    elif (step.function is None) == (step.module is None):
        raise ValueError(f"{path}: {step.op} calls neither one function nor one module")
    if names_in(step.attributes):
        raise ValueError(f"{path}: an attribute reads {names_in(step.attributes)[0]!r}")
    constants = step.attributes if step.op == "operator" else {}
    if step.op == "operator" and not step.operator:
        raise ValueError(f"{path}: it calls no operator of torch")
    for number in _numbers((step.args, step.kwargs, constants)):
        if isinstance(number, int) and not -(2**31) <= number < 2**31 and abs(number) != 2**63 - 1:
            raise ValueError(f"{path}: {number} among the arguments of {step.operator or step.op}")


def _numbers(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, slice):
        yield from _numbers((value.start, value.stop, value.step))
    elif isinstance(value, int | float):
        yield value


def _check_output(step: Step, form: Form, path: str) -> None:
    """Check that a step's output has the declared form of its value."""
    made = step.attributes.get("out") if step.op in _RANKS or step.op in ("add", *_BLENDS) else ""
    if step.op in ("quantize", "requantize"):
        made = "int8" if step.attributes["bits"] <= 8 else "int16"
    if step.op == "dequantize":
        made = "float32"
    held = str(form.dtype).removeprefix("torch.") if isinstance(form, Integers) else form
    held = "float32" if held == "float" else held
    if made and made != held:
        raise ValueError(f"{path}: {step.op} makes {made} where its value is {held}")
    makes = bool(made) or step.op == "requantize"
    if isinstance(form, Integers) and not form.full and makes:
        floor, ceiling = step.attributes.get("floor"), step.attributes.get("ceiling")
        if floor != form.low or ceiling is None or ceiling > form.high:
            raise ValueError(f"{path}: {step.op} stores {floor}…{ceiling}, of {form!r}")
    fields = ("scale", "bits", "narrow") if step.op in ("add", "quantize") else ()
    for name in fields if isinstance(form, Integers) else ():
        if step.attributes.get(name) != getattr(form, name):
            raise ValueError(
                f"{path}: {step.op} has {name}={step.attributes.get(name)}, of {form!r}"
            )


def _check_factors(step: Step, path: str) -> None:
    """Scales and multipliers that the step reads: there, float64, positive."""
    wanted = {"requantize": ["multiplier"], "dequantize": ["scale"], "constant": ["value"]}
    wanted["add"] = [f"scale{i}" for i in range(len(step.args))]
    missing = [name for name in wanted.get(step.op, ()) if name not in step.tensors]
    if missing:
        raise ValueError(f"{path}: the tensor {missing[0]} is missing")
    for name in step.tensors:
        if name.startswith(("multiplier", "scale")):
            factors = _tensor(step, name, torch.float64, path)
            if not bool(((factors > 0) & factors.isfinite()).all()):
                raise ValueError(f"{path}: {name} is not positive and finite everywhere")


def _check_form(name: str, form: Integers) -> None:
    top = 2 ** (form.bits - 1) - 1 if 2 <= form.bits <= 16 else 0
    if not -top - 1 <= form.low <= 0 < form.high <= top or not form.scale > 0:
        raise ValueError(f"value {name}: {form!r} are no integers of a positive scale")


def _check_layer(step: Step, path: str) -> None:
    weight = _tensor(step, "weight", torch.int8, path)
    if weight.dim() not in _RANKS[step.op]:
        raise ValueError(f"{path}: a weight of shape {tuple(weight.shape)} is none of {step.op}")
    channels = _out_channels(step, weight)
    if not weight.numel() or channels % int(step.attributes.get("groups", 1)):
        raise ValueError(f"{path}: a weight of shape {tuple(weight.shape)} in groups that differ")
    for name in ("stride", "padding", "dilation", "output_padding", "kernel_size"):
        sizes = step.attributes.get(name)
        axes = len(step.attributes["kernel_size"]) if step.op == "sparse_conv" else weight.dim() - 2
        if isinstance(sizes, list | tuple) and len(sizes) != axes:
            raise ValueError(f"{path}: {name}={sizes} for {axes} axes")
    moves = [
        step.attributes.get(name) for name in ("stride", "padding", "dilation", "output_padding")
    ]
    if any(number > _LARGEST_STEP for number in _numbers(moves)):
        raise ValueError(f"{path}: strides, paddings and dilations {moves}: above {_LARGEST_STEP}")
    if "padding" in step.attributes:
        _check_padding(step.attributes["padding"], path)
    dense = step.op != "sparse_conv"  # whose residual has a multiplier of 1 unless it says so
    if dense and len(step.args) > 1 and step.attributes.get("addend_multiplier") is None:
        raise ValueError(f"{path}: the multiplier of what is added is missing")
    shape = step.attributes.get("kernel_size", ())
    if step.op == "sparse_conv" and _product(shape) != weight.shape[0]:
        raise ValueError(
            f"{path}: {weight.shape[0]} kernel elements do not fit kernel_size={shape}"
        )
    if "bias" in step.tensors:
        _check_length(_tensor(step, "bias", torch.int32, path), channels, "bias", path)
    for name in ("multiplier", "scale"):
        if name in step.tensors:
            _check_length(_tensor(step, name, torch.float64, path), channels, name, path)
    if step.attributes["out"] != "int32" and "multiplier" not in step.tensors:
        raise ValueError(f"{path}: the tensor multiplier is missing")


def _check_padding(padding: Any, path: str) -> None:
    # By hand: msgspec 0.22 corrupts memory on unions of bounded numbers and pairs within a tuple.
    for size in padding if isinstance(padding, list | tuple) else (padding,):
        pair = size if isinstance(size, list | tuple) and len(size) == 2 else (size,)
        if not all(type(n) is int and 0 <= n < 2**31 for n in pair):
            raise ValueError(f"{path}: padding={padding!r} are no sizes")


def _out_channels(step: Step, weight: Tensor) -> int:
    if step.op == "sparse_conv":
        return weight.shape[2]
    if step.op == "conv_transpose":
        return weight.shape[1] * int(step.attributes["groups"])
    return weight.shape[0]


def _tensor(step: Step, name: str, dtype: torch.dtype, path: str) -> Tensor:
    if name not in step.tensors:
        raise ValueError(f"{path}: the tensor {name} is missing")
    tensor = step.tensors[name]
    if tensor.dtype != dtype:
        raise ValueError(f"{path}: {name} is {tensor.dtype}, expected {dtype}")
    return tensor


def _check_length(tensor: Tensor, channels: int, name: str, path: str) -> None:
    if tuple(tensor.shape) != (channels,):
        raise ValueError(f"{path}: {name} has shape {tuple(tensor.shape)}, expected ({channels},)")


def _product(sizes: Any) -> int:
    total = 1
    for size in sizes:
        total *= int(size)
    return total
