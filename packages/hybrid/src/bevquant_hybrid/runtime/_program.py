"""Programs of integer operators: what a compiled file holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Argument",
    "Operand",
    "Port",
    "Program",
    "Shape",
    "Step",
    "Value",
    "operands",
    "used_constants",
]

Shape = tuple[int, ...] | None  # None where the data decide, as behind nonzero


@dataclass(frozen=True)
class Operand:
    """A tensor that a step reads, by name.

    Attributes:
        name: Of an input, of a step's result, or of a constant.
        constant: Whether it is a constant.
    """

    name: str
    constant: bool = False


Argument = None | bool | int | float | str | torch.dtype | Operand | tuple["Argument", ...]


@dataclass(frozen=True)
class Value:
    """What a step computes."""

    name: str
    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True)
class Step:
    """One operator call.

    Attributes:
        operator: As torch's registry names it, ``bevquant_hybrid::conv`` or ``aten::max.dim``.
        arguments: By the names of its schema; what has its default is left out.
        results: One or several.
        scope: Path of the module that calls it, as far as it is known.
    """

    operator: str
    arguments: Mapping[str, Argument]
    results: tuple[Value, ...]
    scope: str = ""


@dataclass(frozen=True)
class Port:
    """An input or output.

    Attributes:
        name: Of an input: its argument's; of an output: where it stands in the result.
        operand: The tensor in the program.
        dtype: What is given or returned.
        shape: Its shape.
        scale: Constant that holds the value of one integer step, where that is known: of an input
            the scale that quantizes it, of an output the one of its integers.
        axis: Axis that the scale runs along, −1 for one scale.
        quantized: ``qint8``, ``qint16`` or ``qint32`` where a `QTensor` is returned.
        rounding: How that one rounds.
    """

    name: str
    operand: Operand
    dtype: torch.dtype
    shape: Shape
    scale: str | None = None
    axis: int = -1
    quantized: str | None = None
    rounding: str = "half_up"


@dataclass(frozen=True)
class Program:
    """An integer model as a list of steps, with its constants.

    Attributes:
        name: Of the model.
        march: That it was compiled for.
        inputs: In the order of the leaves of `arguments`.
        outputs: In the order of the leaves of `result`.
        arguments: How inputs are nested (`_structure`).
        result: How outputs are nested.
        steps: In the order in which they run.
        constants: Weights, multipliers, tables.
        options: What the compilation was asked for.
    """

    name: str
    march: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    arguments: Any
    result: Any
    steps: tuple[Step, ...]
    constants: Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)


def operands(argument: Argument) -> list[Operand]:
    """Return the tensors in an argument."""
    if isinstance(argument, Operand):
        return [argument]
    if isinstance(argument, tuple):
        return [operand for item in argument for operand in operands(item)]
    return []


def used_constants(program: Program, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the constants that a program reads, in the order in which it does."""
    found = [
        operand.name
        for step in program.steps
        for argument in step.arguments.values()
        for operand in operands(argument)
        if operand.constant
    ]
    ports = (*program.inputs, *program.outputs)
    found += [port.operand.name for port in ports if port.operand.constant]
    found += [port.scale for port in ports if port.scale is not None]
    return {name: constants[name] for name in found}
