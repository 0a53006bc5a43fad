"""Running a program, and printing it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bevquant_graph import in_order
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.runtime._program import Nested, Port, Program, find_operator, flatten
from bevquant_int8sim import IntegerModel
from bevquant_int8sim.program import Ref, Step, TensorType


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
        self._model = IntegerModel(program)
        self._structure = flatten(program.signature[0], self.name).structure

    def __call__(self, *inputs: Any) -> Any:
        """Run the program.

        Args:
            *inputs: Tensors of the types and shapes that it was compiled for, nested as then.
                Members of dictionaries are found by their keys.

        Returns:
            What the converted model returned: the same integers and floats, nested alike (named
            tuples as tuples).

        Raises:
            TypeError: Other inputs than it was compiled for: their number, nesting or type.
            ValueError: Another shape, or NaN in an input.
            AccumulatorOverflowError: A sum leaves int32.
        """
        given = self._checked(inputs)
        device = given.tensors[0].device if given.tensors else torch.device("cpu")
        made = flatten(self._model(*_on_cpu(given)), self.name)
        ports = zip(self.outputs, made.tensors, strict=True)
        return made.build([self._result(port, tensor, device) for port, tensor in ports])

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
        given = _on_cpu(self._checked(inputs))
        names = [port.operand.name for port in self.inputs]
        found = dict(zip(names, flatten(given, self.name).tensors, strict=True))

        def keep(step: Step, read: Any, made: tuple[Tensor, ...]) -> None:
            found.update(zip(step.outputs, made, strict=True))

        self._model.run(given, record=False, observe=keep)
        return found

    def scale_of(self, port: Port) -> Tensor | None:
        """Return the value of one integer step of an input or output, where it is known."""
        return None if port.scale is None else self.program.constants[port.scale]

    def __repr__(self) -> str:
        return _listing(self.program)

    def _result(self, port: Port, tensor: Tensor, device: torch.device) -> Tensor:
        # A copy of a constant: the caller may write into what it gets.
        tensor = tensor.to(device, copy=port.operand.name in self.program.constants)
        scale = self.scale_of(port)
        if port.quantized is None or scale is None:
            return tensor
        scale = scale.to(device)
        return QTensor(tensor, scale, port.quantized, port.axis, rounding=port.rounding)

    def _checked(self, inputs: tuple[Any, ...]) -> Nested:
        expected = ", ".join(f"{p.name}: {TensorType(p.dtype, p.shape)}" for p in self.inputs)
        ordered = in_order(self.program.signature[0], inputs)
        given = flatten(ordered, f"{self.name}: its input")
        if given.structure != self._structure:
            raise TypeError(
                f"{self.name}: expected {len(self.inputs)} tensors ({expected}), nested as when it "
                f"was compiled, got {len(given.tensors)} in {len(inputs)} arguments"
            )
        for port, tensor in zip(self.inputs, given.tensors, strict=True):
            if tensor.dtype != port.dtype:
                raise TypeError(f"{self.name}: {port.name} is {tensor.dtype}: expected {expected}")
            if tuple(tensor.shape) != port.shape:
                raise ValueError(
                    f"{self.name}: {port.name} has shape {list(tensor.shape)}: a compiled model "
                    f"takes the shapes that it was compiled for ({expected}); compile it again for "
                    "others"
                )
        return given


def _on_cpu(given: Nested) -> tuple[Any, ...]:
    arguments: tuple[Any, ...] = given.build([tensor.detach().cpu() for tensor in given.tensors])
    return arguments


def _listing(program: Program) -> str:
    """Print inputs, steps with the types of their results, and outputs."""
    size = sum(tensor.nbytes for tensor in program.constants.values())
    lines = [
        f"{program.name}: {len(program.steps)} operators for {program.march}, "
        f"{len(program.constants)} constants of {size} bytes",
        "integers for bevquant_hybrid.runtime, no binary for a BPU",
        "inputs",
        *(f"  {_port(port, program)}" for port in program.inputs),
        "operators",
        *(f"  {_step(step, program)}" for step in program.steps),
        "outputs",
        *(
            f"  {_port(port, program)} = {_argument(port.operand, program)}"
            for port in program.outputs
        ),
    ]
    return "\n".join(lines)


def _port(port: Port, program: Program) -> str:
    kind = f", {port.quantized}" if port.quantized else ""
    text = f"{port.name}: {TensorType(port.dtype, port.shape)}{kind}"
    if port.scale is None:
        return text
    scale = program.constants[port.scale]
    return f"{text}, scale {f'{float(scale):.7g}' if scale.numel() == 1 else port.scale}"


def _step(step: Step, program: Program) -> str:
    results = ", ".join(f"{name}: {program.values[name].form}" for name in step.outputs)
    given = {**step.kwargs, **step.attributes}
    given.pop("name", None)  # the path stands behind it
    ordered = [a.name for a in find_operator(step.operator)._schema.arguments if a.name in given]
    arguments = ", ".join(f"{name}={_argument(given[name], program)}" for name in ordered)
    name = step.operator.removeprefix("bevquant_hybrid::").replace("::", ".")
    scope = f"  # {step.path}" if step.path else ""
    return f"{results} = {name}({arguments}){scope}"


def _argument(argument: Any, program: Program) -> str:
    if isinstance(argument, Ref):
        tensor = program.constants.get(argument.name)
        if tensor is None:
            return argument.name
        if tensor.numel() == 1:
            return f"{tensor.item():.7g}" if tensor.is_floating_point() else str(tensor.item())
        return f"{argument.name} {TensorType(tensor.dtype, tuple(tensor.shape))}"
    if isinstance(argument, tuple):
        return f"[{', '.join(_argument(item, program) for item in argument)}]"
    if isinstance(argument, torch.dtype):
        return str(argument).removeprefix("torch.")
    return str(argument)
