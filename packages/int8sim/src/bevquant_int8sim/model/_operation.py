"""A model's forward as operations on tensors, and in which form each tensor is wanted.

Names, views and sparse tensors are taken apart; demands are collected from a tensor's readers, last
operation first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from bevquant_graph import Guard, ReadMembers
from bevquant_int8sim.model._form import ACCUMULATORS, FLOAT, Form, Integers, RequiredType
from bevquant_int8sim.model._quantized_layer import Layer
from bevquant_int8sim.model._step import Ref, names_in

# Questions about a tensor, whose answers are the same for its integers.
METADATA = frozenset("shape size ndim dim device numel nelement".split())

CAST = "cast"  # A move from one type of floats to another: the same integers.


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation that makes one tensor (or a host value)."""

    # ``"input"``, ``"constant"``, ``"quantizer"``, ``"layer"``, ``"relu"``, ``"layout"`` (values
    # stay as they are, also in integers), ``"add"``, ``"weighted_sum"`` (of one tensor's integers),
    # ``"matmul"`` (of two tensors' integers), ``"float"``, ``"number"`` or ``"coordinates"``.
    kind: str
    # Module, or the module whose forward calls the function.
    path: str
    # Name of what it makes.
    output: str
    # Positional arguments with `Ref`s in the place of tensors.
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    # What to call, where the kind does not say it.
    function: Callable[..., Any] | None = None
    # Class of the module or name of the function.
    what: str = ""
    # Form in which the result comes about; a sum of integers counts as accumulators.
    natural: Form = FLOAT
    # Weight and settings of a quantized layer.
    layer: Layer | None = None
    # Module that is called as it is.
    module: nn.Module | None = None
    tensor: Tensor | None = None
    # Why it is computed in float.
    reason: str = ""
    # Names of the tensors that a move passes on; its other arguments are host values.
    moved: tuple[str, ...] = ()
    # Name of the coordinates made, for sparse layers.
    coords: str = ""
    # Upper limit of a ReLU6.
    ceiling: float | None = None
    # A move that mixes values: a ReLU behind it cannot be done before it.
    linear: bool = False


@dataclass(frozen=True, eq=False)
class Operations:
    """All operations of a model in order."""

    operations: tuple[Operation, ...]
    # Arguments of the model, with `Ref`s.
    signature: tuple[tuple[Any, ...], Mapping[str, Any]]
    # Features to coordinates of sparse inputs.
    sparse_inputs: Mapping[str, str]
    # What the model returns, with `Ref`s and `SparseRef`s.
    result: Any
    # Names of what is no tensor: coordinates, sizes, numbers.
    hosts: frozenset[str]
    # Names of tensors to the nodes of the graph.
    nodes: Mapping[str, fx.Node]
    # Conditions on the sizes of inputs under which this is the model.
    guards: tuple[Guard, ...]
    # Which members of the arguments the model reads.
    members: ReadMembers


@dataclass(frozen=True, eq=False)
class RequiredTypes:
    """What must be made."""

    # Tensor to the forms in which it is wanted, in a fixed order.
    of: Mapping[str, tuple[RequiredType, ...]]
    # Coordinates, sizes and numbers that are read.
    hosts: frozenset[str]
    # Moves that are done in the form in which their result is wanted; the others are done on
    # floats.
    follows: frozenset[str]


def find_required_types(
    operations: Operations, addends: Mapping[str, Integers] | None = None
) -> RequiredTypes:
    """Walk the operations backwards from the model's result.

    `addends` are layers' results that a sum reads in a form of their own (`addend_form`).
    """
    return _Walk(operations, addends or {}).run()


def addend_form(operation: Operation, addends: Mapping[str, Integers]) -> Any:
    """In which form a sum reads a tensor: its own integers, or a layer's accumulators.

    A layer whose result is among `addends` is rounded to that form first.
    """
    if isinstance(operation.natural, Integers):
        return operation.natural
    return addends.get(operation.output, ACCUMULATORS)


def interpolated_form(read: Operation, required: RequiredType) -> RequiredType:
    """Form in which a move that mixes values is done: before a ReLU, with one rounding.

    Integers of another scale than the reader's are mixed as floats. Accumulators are rounded to the
    reader's integers first.
    """
    other = isinstance(read.natural, Integers) and required.form != read.natural
    return RequiredType(FLOAT if other else required.form)


class _Walk:
    def __init__(self, operations: Operations, addends: Mapping[str, Integers]) -> None:
        self.all = operations
        self.addends = addends
        self.required: dict[str, dict[RequiredType, None]] = {}
        self.size_read: set[str] = set()
        self.hosts: set[str] = set()
        self.follows = _followers(operations.operations)
        self._made_by = {o.output: o for o in operations.operations}

    def run(self) -> RequiredTypes:
        self._read(self.all.result, RequiredType(FLOAT))
        self.hosts.update(o.output for o in self.all.operations if o.what == "require")
        # Readers first: an operation is visited when all demands of its result are known.
        for operation in reversed(self.all.operations):
            self._visit(operation)
        of = {name: tuple(forms) for name, forms in self.required.items()}
        return RequiredTypes(of, frozenset(self.hosts), frozenset(self.follows))

    def _read(self, values: Any, required: RequiredType) -> None:
        for name in names_in(values):
            if name in self.all.hosts:
                self.hosts.add(name)
            else:
                self._require(name, required)

    def _require(self, name: str, required: RequiredType) -> None:
        self.required.setdefault(name, {})[required] = None

    def _visit(self, operation: Operation) -> None:
        name = operation.output
        if operation.kind in ("number", "coordinates"):
            if name in self.hosts:
                self._visit_host(operation)
            return
        if name not in self.required and (
            name in self.size_read or operation.coords in self.hosts
        ):  # only its size, or its coordinates, are asked for
            self._require(name, RequiredType(FLOAT))
        if name in self.required:
            self._visit_tensor(operation, tuple(self.required[name]))

    def _visit_host(self, operation: Operation) -> None:
        reads = operation.what == "getattr" and operation.args[-1] in METADATA
        asks = reads or operation.what in METADATA
        for name in names_in((operation.args, operation.kwargs)):
            if name in self.all.hosts:
                self.hosts.add(name)
            elif asks:
                self.size_read.add(name)
            else:
                self._require(name, RequiredType(FLOAT))

    def _visit_tensor(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        kind = operation.kind
        if kind == "quantizer":
            self._read(operation.args[0], RequiredType(operation.natural))
        elif kind == "layer":
            assert operation.layer is not None
            self._read(operation.args[0], RequiredType(operation.layer.input))
            self._read(operation.args[1:], RequiredType(FLOAT))
        elif kind == "relu":
            for required in required_types:
                self._read(operation.args[0], required.behind_relu(operation.ceiling))
        elif kind == "matmul":
            for operand in operation.args:
                self._read(operand, RequiredType(self._made_by[operand.name].natural))
        elif kind == "weighted_sum":
            natural = self._made_by[operation.args[0].name].natural
            self._read(operation.args[0], RequiredType(natural))
            self._read((operation.args[1:], operation.kwargs), RequiredType(FLOAT))
        elif kind == "add":
            for operand, form in zip(operation.args, self._operand_forms(operation), strict=True):
                self._read(operand, RequiredType(form))
        elif kind == "layout":
            self._visit_move(operation, required_types)
        else:
            self._read((operation.args, operation.kwargs), RequiredType(FLOAT))

    def _visit_move(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        passed = required_types if operation.output in self.follows else (RequiredType(FLOAT),)
        if operation.linear:
            read = self._made_by[operation.moved[0]]
            passed = tuple(dict.fromkeys(interpolated_form(read, r) for r in passed))
        for name in names_in((operation.args, operation.kwargs)):
            if name in operation.moved:
                for required in passed:
                    self._require(name, required)
            else:
                self._read(Ref(name), RequiredType(FLOAT))

    def _operand_forms(self, operation: Operation) -> list[Any]:
        return [addend_form(self._made_by[o.name], self.addends) for o in operation.args]


def _followers(operations: tuple[Operation, ...]) -> set[str]:
    """Layout operators on integers; floats are moved first and quantized afterwards."""
    made: set[str] = set()
    for operation in operations:
        if operation.kind in ("quantizer", "layer", "add", "weighted_sum"):
            made.add(operation.output)
        elif operation.kind == "relu" and operation.args[0].name in made:
            made.add(operation.output)
        elif operation.kind == "layout" and made.issuperset(operation.moved):
            made.add(operation.output)
    return made
