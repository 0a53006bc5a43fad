"""Whether a program that was read from a file can run: operations, types, shapes, order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bevquant_int8sim.model._execute import OPERATION_NAMES
from bevquant_int8sim.model._form import Integers
from bevquant_int8sim.model._program import Program, Step, names_in

__all__ = ["validate"]

_RANKS = {"sparse_conv": (3,), "linear": (2,), "conv": (3, 4, 5), "conv_transpose": (4,)}
_NEEDED = {
    "add": "relu axis out",
    "avg_pool": "relu scale out",
    "dequantize": "relu axis",
    "quantize": "relu scale bits narrow",
    "requantize": "relu axis bits narrow",
    "conv": "relu out narrow stride padding dilation groups",
    "conv_transpose": "relu out narrow stride padding output_padding dilation groups",
    "linear": "relu out narrow",
    "sparse_conv": (
        "relu out narrow indice_key kernel_size stride padding dilation output_padding subm "
        "transposed inverse"
    ),
}


def validate(program: Program) -> None:
    """Check every step.

    Raises:
        ValueError: The first thing that does not fit; the step's module is named.
    """
    known = set(names_in(program.signature)) | set(program.sparse_inputs.values())
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
        lacking = [n for n in _NEEDED.get(step.op, "").split() if n not in step.attributes]
        if lacking:
            raise ValueError(f"{path}: {step.op} lacks the attribute {lacking[0]!r}")
        if step.op in _RANKS:
            _check_layer(step, path)
        _check_factors(step, path)
        unknown = [name for name in step.outputs if name not in program.values]
        if unknown:
            raise ValueError(f"{path}: nothing is said about its output {unknown[0]!r}")
        known.update(step.outputs)
    missing = [name for name in names_in(program.result) if name not in known]
    if missing:
        raise ValueError(f"the result {missing[0]!r} is made by no step")


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
    if form.high != top or form.low not in (-top, -top - 1) or not form.scale > 0:
        raise ValueError(f"value {name}: {form} are no integers of a positive scale")


def _check_layer(step: Step, path: str) -> None:
    weight = _tensor(step, "weight", torch.int8, path)
    if weight.dim() not in _RANKS[step.op]:
        raise ValueError(f"{path}: a weight of shape {tuple(weight.shape)} is none of {step.op}")
    channels = _out_channels(step, weight)
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
