"""From operations and demands to the steps of a program."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from bevquant_int8sim.model._float8 import Float8Layer
from bevquant_int8sim.model._form import ACCUMULATORS, FLOAT, Form, Integers, RequiredType
from bevquant_int8sim.model._operation import (
    Operation,
    Operations,
    RequiredTypes,
    addend_form,
    find_required_types,
)
from bevquant_int8sim.model._program import Program, Ref, SparseRef, Step, Value, replaced
from bevquant_int8sim.model._quantized_layer import Layer

_OUT = {8: "int8", 16: "int16"}
_NAMED_MOVES = ("max_pool", "resize")


def lower(
    operations: Operations, addends: Mapping[str, Integers] | None = None
) -> tuple[Program, dict[fx.Node, dict[RequiredType, str]]]:
    """The program, and the values that hold each node's tensor, by form.

    Every tensor is computed in the needed forms alone.

    Args:
        operations: Operations of the model.
        addends: Layers' results that sums read as integers of these forms instead of accumulators.
    """
    addends = addends or {}
    lowering = _Lowering(operations, find_required_types(operations, addends), addends)
    program = lowering.run()
    held: dict[fx.Node, dict[RequiredType, str]] = {}
    for (source, required), value in lowering.have.items():
        held.setdefault(operations.nodes[source], {})[required] = value
    return program, held


class _Lowering:
    def __init__(
        self, operations: Operations, required_types: RequiredTypes, addends: Mapping[str, Integers]
    ) -> None:
        self.all = operations
        self.required_types = required_types
        self.addends = addends
        self.steps: list[Step] = []
        self.values: dict[str, Value] = {}
        self.have: dict[tuple[str, RequiredType], str] = {}
        self._natural = {o.output: o.natural for o in operations.operations}
        self._made_by = {o.output: o for o in operations.operations}

    def run(self) -> Program:
        for host in sorted(self.all.hosts & self.required_types.hosts):
            self.values[host] = Value("sites" if host.endswith(".sites") else "host", host)
        for operation in self.all.operations:
            required_types = self.required_types.of.get(operation.output, ())
            if operation.kind in ("host", "sites"):
                if operation.output in self.required_types.hosts:
                    self._host(operation)
            elif required_types:
                getattr(self, f"_{operation.kind}")(operation, required_types)
        for step in self.steps:  # coordinates that nothing reads are made all the same
            self.values |= {c: Value("sites", c) for c in step.outputs[1:] if c not in self.values}
        return Program(
            signature=self.all.signature,
            sparse_inputs=self.all.sparse_inputs,
            guards=self.all.guards,
            members=self.all.members,
            steps=tuple(self.steps),
            values=self.values,
            result=self._float_args(self.all.result),
        )

    # Values

    def _new(self, source: str, required: RequiredType) -> str:
        form = required.form
        kind = _OUT[8 if form.bits <= 8 else 16] if isinstance(form, Integers) else form
        name = f"{source}:{kind}" + ("+relu" if required.relu else "")
        while name in self.values:
            name += "'"
        self.values[name] = Value(form, source, required.relu)
        return name

    def _keep(self, source: str, required: RequiredType, value: str) -> None:
        self.have[source, required] = value

    def _any(self, source: str) -> str:
        return next(value for (name, _), value in self.have.items() if name == source)

    def _float_args(self, values: Any) -> Any:
        """Arguments with every tensor as floats."""

        def read(ref: Ref | SparseRef) -> Ref | SparseRef:
            if isinstance(ref, SparseRef):
                return SparseRef(self.have[ref.features, RequiredType(FLOAT)], ref.coords)
            return (
                ref if ref.name in self.all.hosts else Ref(self.have[ref.name, RequiredType(FLOAT)])
            )

        return replaced(values, read)

    # Operations

    def _host(self, operation: Operation) -> None:
        def read(ref: Ref) -> Ref:
            known = ref.name in self.all.hosts
            return (
                ref
                if known
                else Ref(self.have.get((ref.name, RequiredType(FLOAT)), "") or self._any(ref.name))
            )

        self.steps.append(
            Step(
                operation.kind,
                operation.path,
                replaced(operation.args, read),
                (operation.output,),
                kwargs=replaced(operation.kwargs, read),
                attributes={"what": operation.what},
                function=operation.function,
            )
        )

    def _input(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        self.values[operation.output] = Value(FLOAT, operation.output)
        self._from_float(operation, operation.output, required_types)

    def _constant(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        assert operation.tensor is not None
        value = self._new(operation.output, RequiredType(FLOAT))
        tensors = {"value": operation.tensor}
        self.steps.append(Step("constant", operation.path, (), (value,), tensors=tensors))
        self._from_float(operation, value, required_types)

    def _float(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        value = self._new(operation.output, RequiredType(FLOAT))
        outputs = (value, operation.coords) if operation.coords else (value,)
        self.steps.append(
            Step(
                "float",
                operation.path,
                self._float_args(operation.args),
                outputs,
                kwargs=self._float_args(operation.kwargs),
                attributes={"what": operation.what},
                function=operation.function,
                module=copy.deepcopy(operation.module),
                reason=operation.reason,
            )
        )
        self._from_float(operation, value, required_types)

    def _from_float(
        self, operation: Operation, value: str, required_types: tuple[RequiredType, ...]
    ) -> None:
        """Everything wanted of a tensor that comes about as floats."""
        source = operation.output
        self._keep(source, RequiredType(FLOAT), value)
        for required in required_types:
            if required == RequiredType(FLOAT):
                continue
            made = self._new(source, required)
            if isinstance(required.form, Integers):
                attributes = {**_integers(required.form), **_limits(required)}
                step = Step(
                    "quantize", operation.path, (Ref(value),), (made,), attributes=attributes
                )
            else:
                step = Step(
                    "float", operation.path, (Ref(value),), (made,),
                    attributes={"what": "relu", **_limits(required)},
                    function=torch.relu,
                    reason="" if _is_float8(operation) else "its input and its readers are float",
                )  # fmt: skip
            self.steps.append(step)
            self._keep(source, required, made)

    def _quantizer(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        form = operation.natural
        assert isinstance(form, Integers)
        value = self.have[operation.args[0].name, RequiredType(form)]
        self._keep(operation.output, RequiredType(form), value)
        for required in required_types:
            if required != RequiredType(form):
                self._converted(operation, value, form.scale, required, same=required.form == form)

    def _converted(
        self,
        operation: Operation,
        value: str,
        scale: Any,
        required: RequiredType,
        *,
        same: bool = False,
        axis: int = -1,
        relu: bool = False,
    ) -> None:
        """One more form of a tensor that comes about as integers of this scale."""
        made = self._new(operation.output, required)
        attributes: dict[str, Any] = {**_limits(required, relu), "axis": axis}
        scale = torch.as_tensor(scale, dtype=torch.float64)
        tensors = {}
        if same:
            op = "relu"
        elif isinstance(required.form, Integers):
            op, attributes = "requantize", {**attributes, **_integers(required.form)}
            tensors = {"multiplier": scale / required.form.scale}
        else:
            op, tensors = "dequantize", {"scale": scale}
        self.steps.append(
            Step(op, operation.path, (Ref(value),), (made,), attributes=attributes, tensors=tensors)
        )
        self._keep(operation.output, required, made)

    def _layer(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        layer = operation.layer
        assert layer is not None
        single = (
            required_types[0]
            if len(required_types) == 1 and _fusable(required_types[0].form)
            else None
        )
        made = self._new(operation.output, single or RequiredType(ACCUMULATORS))
        form: Form = ACCUMULATORS if single is None else single.form
        self.steps.append(
            Step(
                layer.op,
                operation.path,
                self._layer_args(operation, layer),
                (made, operation.coords) if operation.coords else (made,),
                attributes={
                    **layer.settings,
                    "what": operation.what,
                    **_limits(
                        single or RequiredType(ACCUMULATORS), single is not None and layer.relu
                    ),
                    "out": _out(form),
                    "narrow": isinstance(form, Integers) and form.narrow,
                },
                tensors=_layer_tensors(layer, form),
            )
        )
        self._keep(operation.output, single or RequiredType(ACCUMULATORS), made)
        for required in required_types:
            if single is None and required.form != ACCUMULATORS:
                axis = layer.settings.get("channel_axis", -1)
                self._converted(operation, made, layer.scale, required, axis=axis, relu=layer.relu)

    def _layer_args(self, operation: Operation, layer: Layer) -> tuple[Any, ...]:
        x = self.have[operation.args[0].name, RequiredType(layer.input)]
        return (Ref(x), *operation.args[1:])

    def _relu(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        source = operation.args[0].name
        for required in required_types:
            value = self.have[source, required.behind_relu(operation.ceiling)]
            self._keep(operation.output, required, value)

    def _add(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        refs, tensors, axis = [], {}, -1
        for index, operand in enumerate(operation.args):
            maker = self._made_by[operand.name]
            form = addend_form(maker, self.addends)
            scale: Any = form.scale if isinstance(form, Integers) else None
            if scale is None and maker.layer is not None:
                scale = maker.layer.scale
                axis = maker.layer.settings.get("channel_axis", -1)
            refs.append(Ref(self.have[operand.name, RequiredType(form)]))
            tensors[f"scale{index}"] = torch.as_tensor(scale, dtype=torch.float64)
        for required in required_types:
            made = self._new(operation.output, required)
            form = required.form
            attributes = {**_limits(required), "axis": axis, "out": _out(form)}
            if isinstance(form, Integers):
                attributes |= _integers(form)
            self.steps.append(
                Step(
                    "add",
                    operation.path,
                    tuple(refs),
                    (made,),
                    attributes=attributes,
                    tensors=tensors,
                )
            )
            self._keep(operation.output, required, made)

    def _blend(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        source = operation.args[0].name
        natural = self._natural[source]
        assert isinstance(natural, Integers)
        for required in required_types:
            made = self._new(operation.output, required)
            form = required.form
            attributes = {**_limits(required), "scale": natural.scale, "out": _out(form)}
            if isinstance(form, Integers):
                multiplier = natural.scale / form.scale
                attributes |= {"multiplier": multiplier, "low": form.low, "high": form.high}
            self.steps.append(
                Step(
                    operation.what,
                    operation.path,
                    (
                        Ref(self.have[source, RequiredType(natural)]),
                        *self._float_args(operation.args[1:]),
                    ),
                    (made,),
                    kwargs=self._float_args(operation.kwargs),
                    attributes=attributes,
                )
            )
            self._keep(operation.output, required, made)

    def _move(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        if operation.output not in self.required_types.follows:
            self._from_float(operation, self._moved(operation, RequiredType(FLOAT)), required_types)
            return
        for required in required_types:
            through = RequiredType(required.form) if operation.linear else required
            if (operation.output, through) not in self.have:
                self._keep(operation.output, through, self._moved(operation, through))
            if through != required:
                self._limited(operation, self.have[operation.output, through], required)

    def _moved(self, operation: Operation, required: RequiredType) -> str:
        """The move in one form."""
        made = self._new(operation.output, required)

        def read(ref: Ref) -> Ref:
            if ref.name in self.all.hosts:
                return ref
            moved = ref.name in operation.moved
            return Ref(self.have[ref.name, required if moved else RequiredType(FLOAT)])

        self.steps.append(
            Step(
                operation.what if operation.what in _NAMED_MOVES else "move",
                operation.path,
                replaced(operation.args, read),
                (made,),
                kwargs=replaced(operation.kwargs, read),
                attributes={"what": operation.what},
                function=operation.function,
                module=copy.deepcopy(operation.module),
            )
        )
        return made

    def _limited(self, operation: Operation, value: str, required: RequiredType) -> None:
        """A ReLU as a step of its own, in the form of its input."""
        made = self._new(operation.output, required)
        limits = _limits(required)
        self.steps.append(Step("relu", operation.path, (Ref(value),), (made,), attributes=limits))
        self._keep(operation.output, required, made)


def _is_float8(operation: Operation) -> bool:
    """Whether FP8 numbers make the tensor, whose ReLU an engine does in the same kernel."""
    return isinstance(operation.module, Float8Layer)


def _fusable(form: Form) -> bool:
    """Whether a layer's kernel can store this form itself."""
    return not isinstance(form, Integers) or form.bits in (8, 16) or not form.full


def _limits(required: RequiredType, relu: bool = False) -> dict[str, Any]:
    """Clamp attributes of a step whose stored result includes a ReLU."""
    limits: dict[str, Any] = {"relu": required.relu or relu}
    top, form = required.top(), required.form
    if isinstance(form, Integers) and not form.full:
        limits |= {"floor": form.low}
        top = form.high if top is None else top
    return limits if top is None else limits | {"ceiling": top}


def _out(form: Form) -> str:
    if isinstance(form, Integers):
        return _OUT[8 if form.bits <= 8 else 16]
    return "int32" if form == ACCUMULATORS else "float32"


def _integers(form: Integers) -> dict[str, Any]:
    return {"scale": form.scale, "bits": form.bits, "narrow": form.narrow}


def _layer_tensors(layer: Layer, form: Form) -> dict[str, torch.Tensor]:
    tensors = {"weight": layer.weight}
    if layer.bias is not None:
        tensors["bias"] = layer.bias
    if isinstance(form, Integers):
        tensors["multiplier"] = layer.scale / form.scale
    elif form == FLOAT:
        tensors["multiplier"] = layer.scale
    else:
        tensors["scale"] = layer.scale
    return tensors
