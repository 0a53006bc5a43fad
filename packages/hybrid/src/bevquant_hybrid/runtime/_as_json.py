"""Programs as JSON and back; constants stay outside, as tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bevquant_hybrid.runtime._program import Argument, Operand, Port, Program, Shape, Step, Value

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
    texts = [data[key] for key in ("name", "march")]
    if not all(isinstance(text, str) for text in texts) or not isinstance(data["options"], dict):
        raise TypeError("name, march or options are not as they are written")
    return Program(
        name=texts[0],
        march=texts[1],
        options=data["options"],
        inputs=tuple(_port(port) for port in data["inputs"]),
        outputs=tuple(_port(port) for port in data["outputs"]),
        arguments=data["arguments"],
        result=data["result"],
        steps=tuple(_step(step) for step in data["steps"]),
        constants=constants,
    )


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


def _port(data: dict[str, Any]) -> Port:
    operand = _argument(data["operand"])
    if not isinstance(operand, Operand) or not isinstance(data["name"], str):
        raise TypeError(f"{data!r} is no input or output")
    return Port(
        name=data["name"],
        operand=operand,
        dtype=DTYPES[data["dtype"]],
        shape=_shape(data["shape"]),
        scale=data["scale"],
        axis=data["axis"],
        quantized=data["quantized"],
        rounding=data["rounding"],
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


def _step(data: dict[str, Any]) -> Step:
    results = tuple(
        Value(str(name), DTYPES[dtype], _shape(shape)) for name, dtype, shape in data["results"]
    )
    if not isinstance(data["arguments"], dict):
        raise TypeError(f"{data['arguments']!r} are no arguments by name")
    arguments = {name: _argument(value) for name, value in data["arguments"].items()}
    return Step(str(data["operator"]), arguments, results, str(data["scope"]))


def _shape(data: Any) -> Shape:
    if data is None:
        return None
    if not all(type(n) is int and n >= 0 for n in data):
        raise ValueError(f"{data!r} is no shape")
    return tuple(data)


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
    ((kind, content),) = data.items()
    if kind in ("constant", "value"):
        return Operand(str(content), constant=kind == "constant")
    if kind == "dtype":
        return DTYPES[content]
    if kind == "float":
        return float(content)
    raise ValueError(f"{kind!r} is no kind of argument")
