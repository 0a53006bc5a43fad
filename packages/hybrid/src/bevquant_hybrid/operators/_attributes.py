"""Operators as the table has them: the row of a call, and its attributes."""

from __future__ import annotations

import ast
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import leaves
from bevquant_hybrid.operators._expressions import DTYPES, Value, axis_names
from bevquant_hybrid.operators._table import Operator, find_row, load_support_table

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_FUSED = re.compile(r"^(Conv|Linear)")
_OWN = __package__.partition(".")[0]
_STUBS = {"Quantize": "QuantStub", "DeQuantize": "DeQuantStub"}


def is_leaf(module: nn.Module) -> bool:
    """Whether a call of ``module`` is one operator, rather than what its forward computes."""
    if row_of_module(module):
        return True
    return type(module).__module__.startswith(("torch.nn.modules", "torch.ao.nn")) and not (
        isinstance(module, _CONTAINERS)
    )


def row_of_module(module: nn.Module | None, method: str | None = None) -> str:
    """The row of a module, or ``""``: by its class, or by what its class derives from.

    A class may say it itself, with an attribute ``bpu_operator``. A method of FloatFunctional has
    its operator's row: ``add_relu`` and ``add_scalar`` that of ``torch.add``.
    """
    if method:
        # `add_relu` and `mul_scalar` stand in the rows of `add` and `mul`.
        base = f"torch.{method.removesuffix('_scalar').removesuffix('_relu')}"
        found = find_row(base)
        return base if found is None else found.name
    declared = getattr(type(module), "bpu_operator", "")
    if declared:
        return str(declared)
    function = getattr(module, "function", None)
    if type(module).__module__.startswith(f"{_OWN}.") and isinstance(function, nn.Module):
        return row_of_module(function)  # a table is the function that it tabulates
    for cls in type(module).__mro__:
        for name in _names_of_class(cls):
            row = find_row(name)
            if row is not None:
                return row.name
    return ""


def _names_of_class(cls: type) -> list[str]:
    home, name = cls.__module__, cls.__name__
    if home.startswith(f"{_OWN}."):
        name = _STUBS.get(name, name)
        if _FUSED.match(name):  # ConvAddReLU2d is a Conv2d that does more at its end
            name = re.sub(r"BN|Add|ReLU6?", "", name)
        replaced = load_support_table().replaced_by.get(f"horizon.nn.{name}", ())
        return [f"torch.nn.{name}", f"torch.quantization.{name}", *replaced]
    if home.startswith(("torch.nn.modules", "torch.ao.nn.qat", "torch.ao.quantization")):
        return [f"torch.nn.{name}", f"torch.quantization.{name}"]
    if home.startswith("torchvision."):
        return [f"torchvision.ops.{name}", f"torchvision.models.detection.rpn.{name}"]
    return []


def row_of_function(function: Callable[..., Any], name: str, tensors: int) -> str:
    """The row of a torch function or tensor method, or its plain name where it has none.

    Args:
        function: As `torch.overrides.TorchFunctionMode` hands it over.
        name: How it is called there.
        tensors: How many tensors it reads: ``torch.max`` of two is ``torch.maximum``.
    """
    if isinstance(function, torch._ops.OpOverload):
        row = find_row(function._schema.name)
        return row.name if row is not None else function._schema.name
    # Of two tensors, max and min are those of each element.
    if name.lstrip("_") in ("max", "min") and tensors == 2:
        return f"torch.{name.lstrip('_')}imum"
    # What was called comes first: a function and the method of its name may have two rows.
    method = getattr(torch.Tensor, name, None) is function or hasattr(function, "__objclass__")
    spaces = ["torch.Tensor.", "torch.", "torch.nn.functional."]
    if not method:
        spaces = ["torch.nn.functional.", "torch.", "torch.Tensor."]
        if getattr(torch, name, None) is function:
            spaces = ["torch.", "torch.nn.functional.", "torch.Tensor."]
    for space in spaces:
        for spelling in (name, name.lstrip("_") if not name.startswith("__") else name):
            row = find_row(space + spelling)
            if row is not None:
                return row.name
    return spaces[0] + name


_STORED = {torch.int8: "qint8", torch.int16: "qint16"}
Shape = tuple[int, ...]


@cache
def _arguments() -> Mapping[str, Mapping[str, Any]]:
    """Defaults of functions' arguments after the first, in order."""
    text = (resources.files(__package__) / "arguments.toml").read_text(encoding="utf-8")
    return {
        function: {
            name: ast.literal_eval(default or "None")
            for name, _, default in (argument.partition("=") for argument in arguments)
        }
        for function, arguments in tomllib.loads(text).items()
    }


def tensors_in(value: Any) -> Iterator[Any]:
    """Every tensor, and everything that has a shape and a dtype like one, inside ``value``."""
    for leaf in leaves(value):
        if isinstance(leaf, Tensor) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            yield leaf


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape as plain integers."""
    return tuple(int(size) for size in value.shape)


def count(value: Any) -> int:
    """Number of elements of a tensor, 0 of anything else."""
    return value.numel() if isinstance(value, Tensor) else 0


def parameter_counts(module: nn.Module) -> tuple[int, int]:
    """Weights and bias values of a layer, by the names of its parameters or tensors."""
    if hasattr(module, "weight"):
        return count(module.weight), count(getattr(module, "bias", None))
    biases = sum(p.numel() for name, p in module.named_parameters() if "bias" in name)
    return sum(p.numel() for p in module.parameters()) - biases, biases


def weight_attributes(module: nn.Module, part: nn.Module, input_dtype: str) -> dict[str, Value]:
    """Attributes ``weight_dtype`` and, for qint16 inputs, ``weight_l1`` of weights with filters."""
    found: dict[str, Value] = {}
    for holder in (module, part):
        dtype = getattr(getattr(holder, "weight_fake_quant", None), "dtype", None)
        if isinstance(dtype, str) and dtype in DTYPES:
            found["weight_dtype"] = str(dtype)
    weight = getattr(part, "weight", None)
    if isinstance(weight, Tensor) and weight.dtype in _STORED:
        found["weight_dtype"] = _STORED[weight.dtype]
    if input_dtype == "qint16" and isinstance(weight, Tensor) and weight.ndim > 1:
        # The largest Σ|w| of a filter in integer steps of amax / 127.5, rounded up: the accumulator
        # cannot exceed it times 32768.
        filters = weight.detach().to(torch.float64).flatten(1).abs()
        if not weight.is_floating_point():
            found["weight_l1"] = int(filters.sum(1).max())
        else:
            steps = filters.amax(1).clamp(min=torch.finfo(torch.float64).tiny) / 127.5
            found["weight_l1"] = math.ceil(float((filters.sum(1) / steps).max()))
    return found


def output_dtype(
    operator: str,
    row: Operator | None,
    module: nn.Module | None,
    inputs: Sequence[str],
    output: Any,
) -> str:
    """What the output says itself, else what its operator or module fixes, else its input's."""
    own = getattr(output, "dtype", None)
    if isinstance(own, str) and own in DTYPES:  # a quantized tensor knows its own
        return str(own)
    if operator.endswith(".QuantStub"):
        return _observed(module) or "qint8"
    supports = row.support.values() if row else ()
    fixed = {s.output for s in supports if s.output != "same"}
    only = next(iter(fixed)) if len(fixed) == 1 else ()
    if len(only) == 1 and only[0] in ("float32", "qbool", "qint32"):
        return only[0]
    source = next((dtype for dtype in inputs if dtype != "constant"), "float32")
    if source == "float32":
        return source
    qconfig = getattr(module, "qconfig", None)
    if qconfig is not None and getattr(qconfig, "activation", 0) is None:
        # No activation: the accumulator itself leaves, where the operator has one.
        return "qint32" if any("qint32" in outputs for outputs in fixed) else source
    return _observed(module) or source


def _observed(module: nn.Module | None) -> str:
    """The dtype of what a module's own fake-quantize makes, or ``""``."""
    for holder in (getattr(module, "activation_post_process", None), module):
        dtype = getattr(holder, "dtype", None)
        if isinstance(dtype, str) and dtype in DTYPES:
            return str(dtype)
    return ""


def weighted_part(row: str, module: nn.Module) -> nn.Module:
    """The convolution or linear layer inside a fused module; any other module itself."""
    if row.startswith(("torch.nn.Conv", "torch.nn.Linear")):
        for part in module.modules():
            if isinstance(getattr(part, "weight", None), Tensor):
                return part
    return module


def module_attributes(row: str, module: nn.Module, shapes: Sequence[Shape]) -> dict[str, Value]:
    """Attributes of a module's call that its row names."""
    part = weighted_part(row, module)
    names = (
        *("in_channels", "out_channels", "in_features", "out_features", "kernel_size", "stride"),
        *("padding", "dilation", "groups", "output_padding", "mode", "align_corners"),
        *("scale_factor", "recompute_scale_factor", "padding_mode", "normalized_shape"),
        *("add_bias_kv", "add_zero_attn", "embed_dim", "kdim", "vdim", "shuffle_index"),
        *("max_displacement", "stride1", "stride2", "pad_size"),
    )
    found = _plain({name: getattr(part, name) for name in names if hasattr(part, name)})
    weight = getattr(part, "weight", None)
    if isinstance(weight, Tensor):  # fixed-point modules keep no sizes beside their weights
        found = _sizes_of_weight(row, tuple(weight.shape), found) | found
    if row.endswith("LayerNorm") and "normalized_shape" not in found and shapes:
        found["normalized_shape"] = shapes[0][-len(getattr(part, "axes", (0,))) :]
    if row.endswith("MultiheadAttention"):
        found["add_bias_kv"] = getattr(part, "bias_k", None) is not None
        # What was prepared has no other settings; traced, it does not say so.
        found.setdefault("add_zero_attn", False)
        for name in ("embed_dim", "kdim", "vdim"):
            found.setdefault(name, shapes[0][-1] if shapes else 0)
    if row.startswith("torch.nn.Conv2d"):
        found["sumin"] = len(shapes) > 1
    if "Upsampl" in row or row.endswith("interpolate"):
        found.setdefault("recompute_scale_factor", None)
        found.setdefault("align_corners", None)
    if row.endswith("RoIAlign"):
        found["feature_count"] = max(1, sum(len(shape) == 4 for shape in shapes))
        found["boxes"] = _box_format(shapes)
    return _finish(found)


def function_attributes(
    row: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Sequence[Shape]
) -> dict[str, Value]:
    """Attributes of a function's call: its arguments under the names of the limits."""
    name = name.strip("_")
    rank = len(shapes[0]) if shapes else 0
    given = {
        argument: kwargs.get(argument, args[1 + i] if len(args) > 1 + i else default)
        for i, (argument, default) in enumerate(_arguments().get(name, {}).items())
    }
    found = _plain(given)
    if isinstance(given.get("weight"), Tensor):
        found |= _weight_attributes(row, tuple(given["weight"].shape), int(given.get("groups", 1)))
    if row.startswith(("torch.nn.Conv2d", "torch.nn.Conv3d")):
        found["sumin"] = False
    if "dim" in given:
        found.pop("dim", None)
        found["reduced_axes"] = _axes(given["dim"], rank)
    if row == "torch.Tensor.transpose":
        found["moved_axes"] = _moved_axes(name, args, kwargs, rank)
    if row in ("torch.add", "torch.mul", "torch.sub", "torch.div"):
        # Two operands: what stands behind them is alpha or out.
        found["scalars"] = sum(isinstance(a, int | float) for a in args[:2])
    return _finish(found)


def _sizes_of_weight(row: str, shape: Shape, found: Mapping[str, Value]) -> dict[str, Value]:
    groups = found.get("groups", 1)
    if not row.startswith(("torch.nn.Conv", "torch.nn.Linear")) or not isinstance(groups, int):
        return {}
    return _weight_attributes(row, shape, groups)


def _weight_attributes(row: str, shape: Shape, groups: int) -> dict[str, Value]:
    if "linear" in row.lower():
        return {"out_features": shape[0], "in_features": shape[1]}
    first, second = shape[0], shape[1] * groups
    if "transpose" in row.lower():
        return {"in_channels": first, "out_channels": second, "kernel_size": shape[2:]}
    return {"in_channels": second, "out_channels": first, "kernel_size": shape[2:]}


def _axes(dim: Any, rank: int) -> Value:
    letters = axis_names(rank)
    if dim is None or isinstance(dim, Tensor):
        return tuple(letters)
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    return tuple(letters[d] for d in dims)


def _moved_axes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], rank: int) -> Value:
    order: Sequence[int] = range(rank)
    if name == "T":
        order = order[::-1]
    else:  # of a view, in which the size of each axis is its number
        move = getattr(torch.empty(tuple(order), device="meta"), name)
        order = (move if isinstance(move, Tensor) else move(*args[1:], **kwargs)).shape
    letters = axis_names(rank)
    return tuple(letters[axis] for place, axis in enumerate(order) if place != axis)


def _box_format(shapes: Sequence[Shape]) -> str:
    boxes = [shape for shape in shapes if len(shape) != 4 and shape]
    if boxes and all(len(shape) == 3 and shape[0] == 1 and shape[2] == 4 for shape in boxes):
        return "list of [1, n, 4]"
    return ", ".join(str(list(shape)) for shape in boxes) or "none"


def _plain(values: Mapping[str, Any]) -> dict[str, Value]:
    """The values that are None, a number, a string or several of these, as a tuple."""
    found = {name: tuple(v) if isinstance(v, tuple | list) else v for name, v in values.items()}

    def known(value: Any) -> bool:
        each = value if isinstance(value, tuple) else (value,)
        return value is None or all(isinstance(item, int | float | str) for item in each)

    return {name: value for name, value in found.items() if known(value)}


def _finish(found: dict[str, Value]) -> dict[str, Value]:
    """Fill in what torch leaves implicit: a pool's stride, 'same' padding."""
    if "kernel_size" in found and found.get("stride", 0) in (None, ()):
        found["stride"] = found["kernel_size"]
    if isinstance(found.get("padding"), str):
        found["padding"] = _named_padding(found)
    return found


def _named_padding(found: Mapping[str, Value]) -> Value:
    if found["padding"] == "valid":
        return 0
    kernels, dilations = (
        value if isinstance(value, tuple) else (value,)
        for value in (found["kernel_size"], found.get("dilation", 1))
    )
    if len(dilations) == 1:
        dilations *= len(kernels)
    return tuple(
        int(d) * (int(k) - 1) // 2
        for k, d in zip(kernels, dilations, strict=True)
        if k is not None and d is not None
    )
