"""The program that an integer model runs: a list of steps over named values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import Guard, ReadMembers, refilled
from bevquant_int8sim._sample import SAMPLES
from bevquant_int8sim.model._form import Form

# Functions by name: a tensor's method, an operator of torch.


class Method:
    """Calls the method of its first argument that has this name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(value, self.__name__)(*args, **kwargs)


def torch_operator(name: str) -> torch._ops.OpOverload | None:
    """The operator ``<library>.<operator>.<overload>`` that torch knows."""
    library, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    known = getattr(getattr(torch.ops, library, None), packet, None)
    found = getattr(known, overload or "default", None)
    return found if isinstance(found, torch._ops.OpOverload) and str(found) == name else None


_ROUNDS = frozenset(
    "quantize requantize sparse_conv conv conv_transpose linear add avg_pool".split()
).union(SAMPLES)


@dataclass(frozen=True)
class Ref:
    """A value in the arguments of a step, by its name."""

    name: str


@dataclass(frozen=True)
class SparseRef:
    """A sparse tensor: its features and its coordinates, by name."""

    features: str
    coords: str


@dataclass(frozen=True)
class Value:
    """Facts about a value, known before anything runs.

    Attributes:
        form: Integers with their scale, ``"int32"`` accumulators, ``"float"``; ``"sites"`` for
            coordinates of voxels and ``"host"`` for sizes and numbers; for results of operators,
            type and shape.
        source: Its tensor in the traced model.
        relu: Whether the following ReLU is applied.
    """

    form: Form
    source: str
    relu: bool = False


@dataclass(frozen=True, eq=False)
class Step:
    """One operation.

    Attributes:
        op: Name of the operation (``"quantize"``, ``"sparse_conv"``, ``"float"``, …).
        path: Module that it comes from; of a function, the module whose forward calls it.
        args: Positional arguments; values are `Ref`s, everything else is a constant.
        kwargs: Keyword arguments likewise.
        outputs: Names of the values made.
        attributes: Constants that JSON can hold; of an ``"operator"``, the arguments that read no
            value.
        tensors: Weights and the like.
        function: The function that a step calls, where `op` does not say it.
        module: The module that a step calls.
        reason: Why this is computed in float; empty for all other steps.
    """

    op: str
    path: str
    args: tuple[Any, ...]
    outputs: tuple[str, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    module: nn.Module | None = None
    reason: str = ""

    def kept(self, make: Callable[[Step], Any]) -> Any:
        """The result of `make` for the step, computed once."""
        known: dict[Any, Any] = self.__dict__.setdefault("_kept", {})
        if make not in known:
            known[make] = make(self)
        return known[make]

    def __getstate__(self) -> dict[str, Any]:
        """State without results of `kept`, which a copy recomputes; operators by name."""
        state = {name: value for name, value in vars(self).items() if name != "_kept"}
        return state | ({"function": str(self.function)} if self.operator else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of `__getstate__`."""
        vars(self).update(state)
        if isinstance(self.function, str):
            vars(self)["function"] = torch_operator(self.function)

    @property
    def rounding(self) -> dict[str, Any]:
        """``rounding`` and ``arithmetic`` of the stored result, if set."""
        names = ("rounding", "arithmetic")
        return {name: self.attributes[name] for name in names if name in self.attributes}

    @property
    def operator(self) -> str:
        """Torch's operator that it calls, as torch's registry names it; else empty."""
        return self.function.name() if isinstance(self.function, torch._ops.OpOverload) else ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read, each once."""
        return tuple(dict.fromkeys(names_in((self.args, self.kwargs))))


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
    """Steps in order of execution, and the values between them.

    Attributes:
        signature: Arguments of a call: nested containers of `Ref`s and constants, as
            ``(positional, keyword)``.
        sparse_inputs: Inputs that are sparse tensors: name of the features to that of the
            coordinates.
        members: Which members of dictionaries and dataclasses a call must have, and which others it
            returns; without entries all.
        guards: Conditions on the sizes of the inputs under which the program is the model; of a
            sparse input the features, ``<coordinates>.indices`` and ``<coordinates>.batch_size``.
        steps: In order.
        values: Every value by name.
        constants: Tensors that are there before anything runs, by name; steps read them as values.
        result: What a call returns: nested containers of `Ref`s, `SparseRef`s and constants.
        origin: The folder that it was read from, for messages; empty where it was lowered here.
        operations: Multiplications of each step on the example inputs, by its first output; of one
            that multiplies no matrices, the values that it computes. Filled where the model is held
            against the one that it was made from.
        single: Inputs of float64 that become float32 at the start (`in_single`).
    """

    signature: tuple[tuple[Any, ...], Mapping[str, Any]]
    sparse_inputs: Mapping[str, str]
    steps: tuple[Step, ...]
    values: Mapping[str, Value]
    result: Any
    origin: str = ""
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()
    members: ReadMembers = field(default_factory=ReadMembers)
    operations: dict[str, int] = field(default_factory=dict)
    single: frozenset[str] = frozenset()

    @property
    def float_fallbacks(self) -> tuple[FloatFallback, ...]:
        """Everything that is computed in float, in order, each once."""
        found: dict[FloatFallback, int] = {}
        for step in self.steps:
            if step.reason:
                fallback = FloatFallback(step.path, str(step.attributes["what"]), step.reason)
                found[fallback] = found.get(fallback, 0) + self.operations.get(step.outputs[0], 0)
        total = sum(self.operations.values())
        return tuple(replace(i, share=n / total if total else None) for i, n in found.items())


def rounded(program: Program, rounding: str, arithmetic: str) -> Program:
    """The program with another rounding of all stored integers.

    Default: round half to even, in float64. Operators have a rounding alone.
    """
    stated = {} if rounding == "half_even" else {"rounding": rounding}
    stated |= {} if arithmetic == "float64" else {"arithmetic": arithmetic}

    def with_rounding(step: Step) -> Step:
        if step.op == "operator" and "rounding" in step.attributes:  # it says it always
            return replace(step, attributes={**step.attributes, "rounding": rounding})
        if step.op in _ROUNDS:
            return replace(step, attributes={**step.attributes, **stated})
        if step.op == "resize" and "rounding" in stated and step.kwargs["mode"] == "bilinear":
            return replace(step, kwargs={**step.kwargs, "rounding": rounding})
        return step

    if not stated and all(step.op != "operator" for step in program.steps):
        return program
    return replace(program, steps=tuple(map(with_rounding, program.steps)))


def in_single(program: Program, doubles: Iterable[str]) -> Program:
    """The program in float32, for engines that have no float64.

    Args:
        program: With inputs of float64, as numpy arrays are.
        doubles: Names of these inputs.
    """

    def single(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == torch.float64:
            return value.float()
        if isinstance(value, Mapping):
            return {key: single(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return refilled(type(value), map(single, value))
        return torch.float32 if value is torch.float64 else value

    def in_floats(step: Step) -> Step:
        tensors = single(step.tensors) if step.op == "constant" else step.tensors
        return replace(step, args=single(step.args), kwargs=single(step.kwargs), tensors=tensors)

    constants = single(program.constants)
    steps = tuple(map(in_floats, program.steps))
    return replace(program, steps=steps, constants=constants, single=frozenset(doubles))


def names_in(value: Any) -> list[str]:
    """Names of the values that nested arguments read, in order."""
    if isinstance(value, Ref):
        return [value.name]
    if isinstance(value, SparseRef):
        return [value.features, value.coords]
    if isinstance(value, Mapping):
        return [name for item in value.values() for name in names_in(item)]
    if isinstance(value, list | tuple):
        return [name for item in value for name in names_in(item)]
    if isinstance(value, slice):
        return names_in((value.start, value.stop, value.step))
    return []


def replaced(value: Any, read: Any) -> Any:
    """`value` with every `Ref` and `SparseRef` replaced by the result of ``read``."""
    if isinstance(value, Ref | SparseRef):
        return read(value)
    if isinstance(value, Mapping):
        return {key: replaced(item, read) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return refilled(type(value), [replaced(item, read) for item in value])
    if isinstance(value, slice):
        return slice(*replaced((value.start, value.stop, value.step), read))
    return value
