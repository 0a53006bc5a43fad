"""Compiled programs: integer programs of `bevquant_int8sim` whose steps call operators of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bevquant_hybrid.runtime._operators import find_operator
from bevquant_int8sim import program as int8sim
from bevquant_int8sim.program import Ref, Step, names_in, replaced

__all__ = ["Nested", "Port", "Program", "Shape", "flatten", "operator_step", "used_constants"]

Shape = tuple[int, ...] | None  # None where the data decide, as behind nonzero
_PLAIN = (bool, int, float, str, type(None))


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
    operand: Ref
    dtype: torch.dtype
    shape: Shape
    scale: str | None = None
    axis: int = -1
    quantized: str | None = None
    rounding: str = "half_up"


@dataclass(frozen=True, eq=False, kw_only=True)
class Program(int8sim.Program):
    """An integer program of operators of torch, and what it is compiled for.

    Attributes:
        name: Of the model.
        march: That it was compiled for.
        inputs: In the order of the `Ref`s in `signature`.
        outputs: In the order of the `Ref`s in `result`.
        options: What the compilation was asked for.
    """

    name: str
    march: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


class Nested(NamedTuple):
    """Nested tensors, taken apart.

    Attributes:
        tensors: In their order.
        places: Where each stands: ``boxes``, ``boxes.0``.
        structure: Containers and constants, with a `Ref` to its number in the place of a tensor.
    """

    tensors: list[Any]
    places: list[str]
    structure: Any

    def build(self, tensors: Sequence[Any]) -> Any:
        """The same containers of other tensors."""
        return replaced(self.structure, lambda ref: tensors[int(ref.name)])


def flatten(value: Any, what: str) -> Nested:
    """Take a nested value apart; a `Ref` stands for a tensor.

    Named tuples become tuples, and dictionaries of any kind dict. A tensor that is the whole value
    has the place ``output``.

    Raises:
        TypeError: It holds something else; the message starts with `what`.
    """
    tensors: list[Any] = []
    places: list[str] = []

    def described(item: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(item, Tensor | Ref):
            tensors.append(item)
            places.append(".".join(map(str, path)) or "output")
            return Ref(str(len(tensors) - 1))
        if isinstance(item, list | tuple):
            parts = [described(part, (*path, i)) for i, part in enumerate(item)]
            return parts if isinstance(item, list) else tuple(parts)
        if isinstance(item, dict):
            wrong = [key for key in item if not isinstance(key, str | int)]
            if not wrong:
                return {key: described(part, (*path, key)) for key, part in item.items()}
            item = wrong[0]
        elif isinstance(item, _PLAIN):
            return item
        raise TypeError(
            f"{what}{''.join(f'[{key!r}]' for key in path)} is a {type(item).__name__}: expected "
            "tensors, in lists, tuples and dictionaries with names or integers as keys"
        )

    structure = described(value, ())
    return Nested(tensors, places, structure)


def operator_step(
    operator: str, arguments: Mapping[str, Any], outputs: tuple[str, ...], path: str = ""
) -> Step:
    """A step that calls an operator of torch.

    Args:
        operator: As torch's registry names it, ``bevquant_hybrid::conv`` or ``aten::max.dim``.
        arguments: By the names of its schema; what has its default is left out.
        outputs: Names of the values made.
        path: Of the module that calls it, as far as it is known.
    """
    reads = {name: value for name, value in arguments.items() if names_in(value)}
    constants = {name: value for name, value in arguments.items() if name not in reads}
    function = find_operator(operator)
    return Step("operator", path, (), outputs, reads, constants, function=function)


def used_constants(program: Program, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the constants that a program reads, in the order in which it does."""
    ports = (*program.inputs, *program.outputs)
    found = [name for step in program.steps for name in step.inputs]
    found += [port.operand.name for port in ports]
    found += [port.scale for port in ports if port.scale is not None]
    return {name: constants[name] for name in found if name in constants}
