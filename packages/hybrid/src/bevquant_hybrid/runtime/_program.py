"""Compiled programs: integer programs of `bevquant_int8sim` whose steps call operators of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bevquant_graph import in_order
from bevquant_hybrid.qtensor import QTensor
from bevquant_int8sim import IntegerModel
from bevquant_int8sim import program as int8sim
from bevquant_int8sim.program import OperatorCall, Ref, TensorType, names_in, replaced

from ._operators import find_operator

Shape = tuple[int, ...] | None  # None where the data decide, as behind nonzero
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Port:
    """An input or output."""

    name: str  # an input's argument name, or an output's place in the result
    operand: Ref  # the tensor in the program
    dtype: torch.dtype  # type of the tensor
    shape: Shape  # its shape
    # Constant with the value of one integer step, if known: the scale that quantizes the
    # input, or that of the output's integers
    scale: str | None = None
    axis: int = -1  # axis that the scale runs along, −1 for one scale
    quantized: str | None = None  # qint8, qint16 or qint32 where a `QTensor` is returned
    rounding: str = "half_up"  # its rounding


@dataclass(frozen=True, eq=False, kw_only=True)
class Program(int8sim.Program):
    """An integer program of operators of torch, and what it is compiled for."""

    steps: tuple[OperatorCall, ...]
    name: str  # of the model
    march: str  # that it was compiled for
    inputs: tuple[Port, ...]  # in the order of the `Ref`s in `signature`
    outputs: tuple[Port, ...]  # in the order of the `Ref`s in `result`
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the compilation


class Nested(NamedTuple):
    """Nested tensors, taken apart."""

    tensors: list[Any]  # in their order
    places: list[str]  # where each stands: boxes, boxes.0
    structure: Any  # containers and constants, with a `Ref` to its number in the place of a tensor

    def build(self, tensors: Sequence[Any]) -> Any:
        """The same containers of other tensors."""
        return replaced(self.structure, lambda ref: tensors[int(ref.name)])


def flatten(value: Any, what: str) -> Nested:
    """Take a nested value apart; a `Ref` stands for a tensor.

    A tensor that is the whole value has the place ``output``.
    """
    tensors: list[Any] = []
    places: list[str] = []

    def described(item: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(item, Tensor | Ref):
            tensors.append(item)
            places.append(".".join(map(str, path)) or "output")
            return Ref(str(len(tensors) - 1))
        # Named tuples become tuples, and dictionaries of any kind dict.
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
) -> OperatorCall:
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
    return OperatorCall(path, (), outputs, reads, function=function, constants=constants)


def used_constants(program: Program, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the constants that a program reads, in the order in which it does."""
    ports = (*program.inputs, *program.outputs)
    found = [name for step in program.steps for name in step.inputs]
    found += [port.operand.name for port in ports]
    found += [port.scale for port in ports if port.scale is not None]
    return {name: constants[name] for name in found if name in constants}


class CompiledModel:
    """A program of integer operators, called like the converted model.

    It computes on the CPU, with the functions of the fixed-point modules; results are returned on
    the device of the first input. Its string is a listing of the program.

    Attributes:
        program: The program.
        name: Of the model.
        march: That it was compiled for.
        inputs: Names, types, shapes and scales of inputs.
        outputs: The same of outputs.
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
            *inputs: Tensors of the types, shapes and nesting that it was compiled for. Members of
                dictionaries are found by their keys.

        Returns:
            The converted model's result: the same integers, floats and nesting (named tuples as
            tuples).

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
        """Run the program and return every operator's result.

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

        def keep(step: Any, read: Any, made: tuple[Tensor, ...]) -> None:
            found.update(zip(step.outputs, made, strict=True))

        self._model.run(given, record=False, observe=keep)
        return found

    def scale_of(self, port: Port) -> Tensor | None:
        """Return the value of one integer step of an input or output, or None."""
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


def _step(step: OperatorCall, program: Program) -> str:
    results = ", ".join(f"{name}: {program.values[name].form}" for name in step.outputs)
    given = step.given
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
