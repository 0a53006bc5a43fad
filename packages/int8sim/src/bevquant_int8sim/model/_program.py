"""The program that an integer model runs: a list of steps over named values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bevquant_graph import Guard, ReadMembers, refilled
from bevquant_int8sim.model._form import Form
from bevquant_int8sim.model._integer_steps import Rounds
from bevquant_int8sim.model._step import Constant, OperatorCall, Step


@dataclass(frozen=True)
class Value:
    """Facts about a value, known before anything runs."""

    # Integers with their scale, ``"int32"`` accumulators, ``"float"``, ``"coordinates"`` of voxels,
    # ``"number"`` for sizes and numbers; for results of operators type and shape.
    form: Form
    # Its tensor in the traced model.
    source: str
    # Whether the following ReLU is applied.
    relu: bool = False


@dataclass(frozen=True)
class FloatFallback:
    """A part of the model that is computed in float.

    Attributes:
        path: The module, or the module whose forward calls the function.
        what: Class of the module, or name of the function.
        reason: Why it has no integer form here.
        share: Share of the model's operations, 0 to 1; None before they were counted.
    """

    path: str
    what: str
    reason: str
    share: float | None = field(default=None, compare=False)


Island = FloatFallback  # its former name


@dataclass(frozen=True, eq=False)
class Program:
    """Steps in order of execution, and the values between them."""

    # Arguments of a call: nested containers of `Ref`s and constants, as ``(positional, keyword)``.
    signature: tuple[tuple[Any, ...], Mapping[str, Any]]
    # Inputs that are sparse tensors: name of the features to that of the coordinates.
    sparse_inputs: Mapping[str, str]
    steps: tuple[Step, ...]
    values: Mapping[str, Value]
    # What a call returns: nested containers of `Ref`s, `SparseRef`s and constants.
    result: Any
    # The folder that it was read from, for messages; empty where it was lowered here.
    origin: str = ""
    # Tensors that are there before anything runs, by name; steps read them as values.
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    # Conditions on the sizes of the inputs under which the program is the model; of a sparse input
    # the features, ``<coordinates>.indices`` and ``<coordinates>.batch_size``.
    guards: tuple[Guard, ...] = ()
    # Which members of dictionaries and dataclasses a call must have, and which others it returns;
    # without entries all.
    members: ReadMembers = field(default_factory=ReadMembers)
    # Multiplications of each step on the example inputs, by its first output; without matrix
    # products the number of computed values. Filled when the model is compared with its source.
    operations: dict[str, int] = field(default_factory=dict)
    # Inputs of float64 that become float32 at the start (`in_single`).
    single: frozenset[str] = frozenset()

    @property
    def float_fallbacks(self) -> tuple[FloatFallback, ...]:
        """Everything that is computed in float, in order, each once."""
        found: dict[FloatFallback, int] = {}
        for step in self.steps:
            if step.reason:
                fallback = FloatFallback(step.path, step.label, step.reason)
                found[fallback] = found.get(fallback, 0) + self.operations.get(step.outputs[0], 0)
        total = sum(self.operations.values())
        return tuple(replace(i, share=n / total if total else None) for i, n in found.items())


def rounded(program: Program, rounding: str, arithmetic: str) -> Program:
    """The program with another rounding of all stored integers.

    Default: round half to even, in float64. Operators have a rounding alone.
    """
    settings: dict[str, Any] = {"rounding": rounding, "arithmetic": arithmetic}

    def with_rounding(step: Step) -> Step:
        if isinstance(step, OperatorCall) and "rounding" in step.constants:  # it says it always
            return replace(step, constants={**step.constants, "rounding": rounding})
        if isinstance(step, Rounds):
            return replace(step, **settings)
        return step

    return replace(program, steps=tuple(map(with_rounding, program.steps)))


def in_single(program: Program, doubles: Iterable[str]) -> Program:
    """The program in float32, without the float64 inputs `doubles`, for engines without float64."""

    def single(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == torch.float64:
            return value.float()
        if isinstance(value, Mapping):
            return {key: single(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return refilled(type(value), map(single, value))
        return torch.float32 if value is torch.float64 else value

    def in_floats(step: Step) -> Step:
        if isinstance(step, Constant):
            return replace(step, value=single(step.value))
        return replace(step, args=single(step.args), kwargs=single(step.kwargs))

    constants = single(program.constants)
    steps = tuple(map(in_floats, program.steps))
    return replace(program, steps=steps, constants=constants, single=frozenset(doubles))
