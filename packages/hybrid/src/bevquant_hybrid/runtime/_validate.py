"""Whether a program read from a file says only what a program may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bevquant_hybrid.dtype import as_quant_dtype
from bevquant_hybrid.runtime import _structure as structure
from bevquant_hybrid.runtime._operators import find_operator, is_known
from bevquant_hybrid.runtime._program import Argument, Operand, Port, Program, Step, operands

__all__ = ["validate"]


def validate(program: Program) -> None:
    """Check that names are defined before they are read, and calls fit their operators.

    Raises:
        ValueError: What is wrong, and in which step.
    """
    defined: set[str] = set()
    used: set[str] = set()

    def read(where: str, operand: Operand) -> None:
        if operand.constant:
            if operand.name not in program.constants:
                raise ValueError(f"{where} reads the tensor {operand.name!r}, which is missing")
            used.add(operand.name)
        elif operand.name not in defined:
            raise ValueError(f"{where} reads {operand.name!r}, which nothing before it computes")

    def define(where: str, name: str) -> None:
        if name in defined:
            raise ValueError(f"{where} computes {name!r}, which is there already")
        defined.add(name)

    for port in program.inputs:
        if port.operand.constant or port.shape is None:
            raise ValueError(f"the input {port.name!r} is a constant or has no shape")
        define(f"the input {port.name!r}", port.operand.name)
    for number, step in enumerate(program.steps):
        where = f"step {number} ({step.operator})"
        _check_call(where, step)
        for argument in step.arguments.values():
            for operand in operands(argument):
                read(where, operand)
        for value in step.results:
            define(where, value.name)
    for port in program.outputs:
        read(f"the output {port.name!r}", port.operand)
    for port in (*program.inputs, *program.outputs):
        _check_scale(port, program.constants, used)
    for what, nested, ports in (
        ("inputs", program.arguments, program.inputs),
        ("outputs", program.result, program.outputs),
    ):
        if structure.check(nested, ValueError) != len(ports):
            raise ValueError(f"its {what} are not nested as many as they are")
    if "tuple" not in program.arguments:
        raise ValueError("its inputs are no tuple of arguments")
    idle = sorted(set(program.constants) - used)
    if idle:
        raise ValueError(f"it holds tensors that nothing reads: {', '.join(idle)}")


def _check_scale(port: Port, constants: Mapping[str, Any], used: set[str]) -> None:
    if port.scale is not None:
        if port.scale not in constants:
            raise ValueError(f"the scale of {port.name!r}, the tensor {port.scale!r}, is missing")
        used.add(port.scale)
    if port.quantized is not None:
        if as_quant_dtype(port.quantized).bits < 8:
            raise ValueError(f"dtype={str(port.quantized)!r}: expected qint8, qint16 or qint32")
        if port.scale is None or type(port.axis) is not int:
            raise ValueError(f"the output {port.name!r} is quantized and has no scale")
    if port.rounding not in ("half_up", "half_even"):
        raise ValueError(f"{port.name!r}: rounding={port.rounding!r}")


def _check_call(where: str, step: Step) -> None:
    if not is_known(step.operator):
        raise ValueError(f"{where}: a program may not call that")
    if not step.results:
        raise ValueError(f"{where}: it computes nothing")
    schema = {
        argument.name: argument for argument in find_operator(step.operator)._schema.arguments
    }
    for name, value in step.arguments.items():
        if name not in schema:
            raise ValueError(f"{where}: it has no argument {name!r}")
        kind = str(schema[name].type)
        if not _fits(kind, value) and not (name == "dtype" and isinstance(value, torch.dtype)):
            raise ValueError(f"{where}: {name}={value!r} is no {kind}")
    absent = [n for n, a in schema.items() if n not in step.arguments and not a.has_default_value()]
    if absent:
        raise ValueError(f"{where}: {', '.join(absent)} missing")


def _fits(kind: str, value: Argument) -> bool:
    """Whether a value may stand for an argument of a type as schemas print it."""
    if kind.startswith("Optional["):
        return value is None or _fits(kind[len("Optional[") : -1], value)
    if kind.startswith("List["):
        inner = kind[len("List[") : -1]
        return isinstance(value, tuple) and all(_fits(inner, item) for item in value)
    if kind in ("number", "Scalar", "float"):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "Tensor":  # torch takes numbers in their place
        return isinstance(value, Operand | int | float) and not isinstance(value, bool)
    kinds: dict[str, type] = {"int": int, "bool": bool, "str": str}
    return type(value) is kinds.get(kind)
