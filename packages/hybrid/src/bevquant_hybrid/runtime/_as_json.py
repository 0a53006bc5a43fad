"""Programs as JSON and back; constants stay outside, as tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from bevquant_hybrid.runtime._program import Argument, Operand, Port, Program, Step, Value
from bevquant_quantizers.documents import Size, as_form

__all__ = ["DTYPES", "from_json", "to_json"]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
        *(torch.float32, torch.float64),
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def to_json(program: Program) -> dict[str, Any]:
    """Return everything but the constants."""
    return {
        "march": program.march,
        "name": program.name,
        "options": dict(program.options),
        "inputs": [_port_to_json(port) for port in program.inputs],
        "outputs": [_port_to_json(port) for port in program.outputs],
        "arguments": program.arguments,
        "result": program.result,
        "steps": [_step_to_json(step) for step in program.steps],
    }


def from_json(data: dict[str, Any], constants: Mapping[str, Tensor]) -> Program:
    """Undo `to_json`.

    Raises:
        KeyError, TypeError, ValueError: It is not what `to_json` makes.
    """
    given = as_form(data, _ProgramData, where="its program", what="program of compile_model")
    return Program(
        name=given.name,
        march=given.march,
        options=given.options,
        inputs=tuple(_port(port) for port in given.inputs),
        outputs=tuple(_port(port) for port in given.outputs),
        arguments=given.arguments,
        result=given.result,
        steps=tuple(_step(step) for step in given.steps),
        constants=constants,
    )


class _PortData(msgspec.Struct):
    name: str
    operand: dict[str, str]
    dtype: str
    shape: tuple[Size, ...] | None
    scale: str | None
    axis: int
    quantized: str | None
    rounding: str


class _StepData(msgspec.Struct):
    operator: str
    arguments: dict[str, Any]
    results: list[tuple[str, str, tuple[Size, ...] | None]]
    scope: str


class _ProgramData(msgspec.Struct):
    name: str
    march: str
    options: dict[str, Any]
    inputs: list[_PortData]
    outputs: list[_PortData]
    arguments: dict[str, Any]
    result: dict[str, Any]
    steps: list[_StepData]


def _port_to_json(port: Port) -> dict[str, Any]:
    return {
        "name": port.name,
        "operand": _argument_to_json(port.operand),
        "dtype": _NAMES[port.dtype],
        "shape": None if port.shape is None else list(port.shape),
        "scale": port.scale,
        "axis": port.axis,
        "quantized": port.quantized,
        "rounding": port.rounding,
    }


def _port(data: _PortData) -> Port:
    operand = _argument(data.operand)
    if not isinstance(operand, Operand):
        raise TypeError(f"{data.name!r} is no input or output")
    return Port(
        name=data.name,
        operand=operand,
        dtype=_dtype(data.dtype),
        shape=data.shape,
        scale=data.scale,
        axis=data.axis,
        quantized=data.quantized,
        rounding=data.rounding,
    )


def _step_to_json(step: Step) -> dict[str, Any]:
    return {
        "operator": step.operator,
        "arguments": {name: _argument_to_json(v) for name, v in step.arguments.items()},
        "results": [
            [v.name, _NAMES[v.dtype], None if v.shape is None else list(v.shape)]
            for v in step.results
        ],
        "scope": step.scope,
    }


def _step(data: _StepData) -> Step:
    results = tuple(Value(name, _dtype(dtype), shape) for name, dtype, shape in data.results)
    arguments = {name: _argument(value) for name, value in data.arguments.items()}
    return Step(data.operator, arguments, results, data.scope)


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"{name!r} is no type of a tensor here")
    return DTYPES[name]


def _argument_to_json(value: Argument) -> Any:
    if isinstance(value, Operand):
        return {"constant" if value.constant else "value": value.name}
    if isinstance(value, torch.dtype):
        return {"dtype": _NAMES[value]}
    if isinstance(value, tuple):
        return [_argument_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _argument(data: Any) -> Argument:
    if isinstance(data, list):
        return tuple(_argument(item) for item in data)
    if not isinstance(data, dict):
        if data is None or isinstance(data, bool | int | float | str):
            return data
        raise TypeError(f"{data!r} is no argument")
    if len(data) != 1:
        raise ValueError(f"{sorted(data)} is no kind of argument")
    ((kind, content),) = data.items()
    if kind in ("constant", "value") and isinstance(content, str):
        return Operand(content, constant=kind == "constant")
    if kind == "dtype":
        return _dtype(content)
    if kind == "float" and content in ("nan", "inf", "-inf"):
        return float(content)
    raise ValueError(f"{kind!r} is no kind of argument")
