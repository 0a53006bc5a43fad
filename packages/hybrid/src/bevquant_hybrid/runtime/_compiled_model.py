"""Running a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.runtime import _structure as structure
from bevquant_hybrid.runtime._listing import listing, type_text
from bevquant_hybrid.runtime._operators import find_operator
from bevquant_hybrid.runtime._program import Argument, Operand, Port, Program, Step, operands
from bevquant_int8sim import AccumulatorOverflowError

__all__ = ["CompiledModel"]


class CompiledModel:
    """A program of integer operators that can be called as the converted model could.

    It computes on the CPU, with the functions of the fixed-point modules; results are returned on
    the device of the first input. Its string is a listing of the program.

    Attributes:
        program: The program.
        name: Of the model.
        march: That it was compiled for.
        inputs: What it takes: names, types, shapes, scales.
        outputs: What it returns.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.name, self.march = program.name, program.march
        self.inputs, self.outputs = program.inputs, program.outputs
        self._operators = {step.operator: find_operator(step.operator) for step in program.steps}
        self._last = _last_reads(program)

    def __call__(self, *inputs: Any) -> Any:
        """Run the program.

        Args:
            *inputs: Tensors of the types and shapes that it was compiled for, nested as then.

        Returns:
            What the converted model returned: the same integers and floats, nested alike (named
            tuples as tuples).

        Raises:
            TypeError: Other inputs than it was compiled for: their number, nesting or type.
            ValueError: Another shape, or NaN in an input.
            AccumulatorOverflowError: A sum leaves int32.
        """
        given = self._checked(inputs)
        device = given[0].device if given else torch.device("cpu")
        values = self._given(given)
        with torch.no_grad():
            for step, finished in zip(self.program.steps, self._last, strict=True):
                self._run(step, values)
                for name in finished:
                    del values[name]
            results = [self._result(port, values, device) for port in self.outputs]
        return structure.build(self.program.result, results)

    def values(self, *inputs: Any) -> dict[str, Tensor]:
        """Run the program and return what every operator computed.

        Args:
            *inputs: As for a call.

        Returns:
            The inputs and the results of all operators by their names in the listing, such as
            ``%3``, in the order in which they are computed.

        Raises:
            TypeError, ValueError, AccumulatorOverflowError: As for a call.
        """
        values = self._given(self._checked(inputs))
        with torch.no_grad():
            for step in self.program.steps:
                self._run(step, values)
        return values

    def _given(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        return {
            port.operand.name: tensor.detach().cpu()
            for port, tensor in zip(self.inputs, inputs, strict=True)
        }

    def scale_of(self, port: Port) -> Tensor | None:
        """Return the value of one integer step of an input or output, where it is known."""
        return None if port.scale is None else self.program.constants[port.scale]

    def __repr__(self) -> str:
        return listing(self.program)

    def _run(self, step: Step, values: dict[str, Tensor]) -> None:
        arguments = {name: self._value(a, values) for name, a in step.arguments.items()}
        try:
            result = call(self._operators[step.operator], arguments)
            results = [result] if isinstance(result, Tensor) else list(result)
        except (ValueError, AccumulatorOverflowError):
            raise
        except Exception as error:
            # The inputs were checked: what torch's functions do not take now, the file says.
            where = f"{self.name}: {step.operator} in {step.scope or 'the model'}"
            raise ValueError(
                f"{where} does not compute on what its program hands it: {error}; compile the "
                "model again"
            ) from error
        for value, tensor in zip(step.results, results, strict=True):
            values[value.name] = tensor

    def _value(self, argument: Argument, values: dict[str, Tensor]) -> Any:
        if isinstance(argument, Operand):
            return self._read(argument, values)
        if isinstance(argument, tuple):
            return [self._value(item, values) for item in argument]
        return argument

    def _read(self, operand: Operand, values: dict[str, Tensor]) -> Tensor:
        return self.program.constants[operand.name] if operand.constant else values[operand.name]

    def _result(self, port: Port, values: dict[str, Tensor], device: torch.device) -> Tensor:
        # A copy of a constant: the caller may write into what it gets.
        tensor = self._read(port.operand, values).to(device, copy=port.operand.constant)
        scale = self.scale_of(port)
        if port.quantized is None or scale is None:
            return tensor
        scale = scale.to(device)
        return QTensor(tensor, scale, port.quantized, port.axis, rounding=port.rounding)

    def _checked(self, inputs: tuple[Any, ...]) -> list[Tensor]:
        expected = ", ".join(f"{p.name}: {type_text(p.dtype, p.shape)}" for p in self.inputs)
        given, nested = structure.flatten(inputs, f"{self.name}: its input")
        if nested != self.program.arguments:
            raise TypeError(
                f"{self.name}: expected {len(self.inputs)} tensors ({expected}), nested as when it "
                f"was compiled, got {len(given)} in {len(inputs)} arguments"
            )
        for port, tensor in zip(self.inputs, given, strict=True):
            if tensor.dtype != port.dtype:
                raise TypeError(f"{self.name}: {port.name} is {tensor.dtype}: expected {expected}")
            if tuple(tensor.shape) != port.shape:
                raise ValueError(
                    f"{self.name}: {port.name} has shape {list(tensor.shape)}: a compiled model "
                    f"takes the shapes that it was compiled for ({expected}); compile it again for "
                    "others"
                )
        return given


def call(operator: Any, arguments: dict[str, Any]) -> Any:
    """Call an operator of torch with arguments by name."""
    # By position where the schema has it so: torch's parser takes numbers as tensors there alone.
    positional: list[Any] = []
    named = dict(arguments)
    for argument in operator._schema.arguments:
        if argument.kwarg_only or argument.name not in named:
            break
        positional.append(named.pop(argument.name))
    return operator(*positional, **named)


def _last_reads(program: Program) -> Sequence[tuple[str, ...]]:
    """For each step, the values that nothing reads behind it."""
    alive = {port.operand.name for port in program.outputs if not port.operand.constant}
    finished: list[tuple[str, ...]] = []
    for step in reversed(program.steps):
        read = {o.name for a in step.arguments.values() for o in operands(a) if not o.constant}
        made = {value.name for value in step.results}
        over = (read | made) - alive
        finished.append(tuple(sorted(over)))
        alive |= over
    return finished[::-1]
