"""From operations and demands to the steps of a program."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from bevquant_int8sim.model._float8 import Float8Layer
from bevquant_int8sim.model._form import ACCUMULATORS, FLOAT, Form, Integers, RequiredType
from bevquant_int8sim.model._integer_steps import (
    Add,
    AvgPool,
    DeformableAttention,
    Dequantize,
    GridSample,
    Matmul,
    MaxPool,
    Quantize,
    Relu,
    Requantize,
    Resize,
    WeightedSum,
)
from bevquant_int8sim.model._operation import (
    CAST,
    Operation,
    Operations,
    RequiredTypes,
    addend_form,
    find_required_types,
    interpolated_form,
)
from bevquant_int8sim.model._program import Program, Value
from bevquant_int8sim.model._step import (
    Constant,
    Coordinates,
    FloatCall,
    FloatRelu,
    LayoutCall,
    NumberCall,
    Ref,
    SparseRef,
    Step,
    replaced,
)

_SUMS: dict[str, type[WeightedSum]] = {
    kind.op: kind for kind in (AvgPool, GridSample, DeformableAttention)
}


def lower(
    operations: Operations, addends: Mapping[str, Integers] | None = None
) -> tuple[Program, dict[fx.Node, dict[RequiredType, str]]]:
    """The program, and the values that hold each node's tensor, by form.

    Every tensor is computed in the needed forms alone. `addends` are layers' results that sums read
    as integers of these forms instead of accumulators.
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
        self._made_by = {o.output: o for o in operations.operations}

    def run(self) -> Program:
        # Sorted, as a set has no order that a saved program could keep.
        for host in sorted(self.all.hosts & self.required_types.hosts):
            self.values[host] = Value("coordinates" if host.endswith(".sites") else "number", host)
        for operation in self.all.operations:
            required_types = self.required_types.of.get(operation.output, ())
            if operation.kind in ("number", "coordinates"):
                if operation.output in self.required_types.hosts:
                    self._host(operation)
            elif required_types:
                getattr(self, f"_{operation.kind}")(operation, required_types)
        for step in self.steps:  # coordinates that nothing reads are made all the same
            self.values |= {
                c: Value("coordinates", c) for c in step.outputs[1:] if c not in self.values
            }
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
        """Name of the value that holds a tensor in a form."""
        form = required.form
        kind = str(form.dtype).removeprefix("torch.") if isinstance(form, Integers) else form
        name = f"{source}:{kind}" + ("+relu" if required.relu else "")
        while name in self.values:
            name += "'"
        self.values[name] = Value(form, source, required.relu)
        self.have[source, required] = name
        return name

    def _any(self, source: str) -> str:
        return next(value for (name, _), value in self.have.items() if name == source)

    def _float_args(self, values: Any) -> Any:
        """Arguments with every tensor as floats."""

        def read(ref: Ref | SparseRef) -> Ref | SparseRef:
            if isinstance(ref, SparseRef):
                return SparseRef(self.have[ref.features, RequiredType(FLOAT)], ref.coords)
            known = ref.name in self.all.hosts
            return ref if known else Ref(self.have[ref.name, RequiredType(FLOAT)])

        return replaced(values, read)

    # Operations

    def _host(self, operation: Operation) -> None:
        def read(ref: Ref) -> Ref:
            if ref.name in self.all.hosts:
                return ref
            return Ref(self.have.get((ref.name, RequiredType(FLOAT))) or self._any(ref.name))

        called = operation.path, replaced(operation.args, read), (operation.output,)
        kwargs = replaced(operation.kwargs, read)
        if operation.kind == "coordinates":
            self.steps.append(Coordinates(*called))
        else:
            function = operation.function
            step = NumberCall(*called, kwargs, name=operation.what, function=function)
            self.steps.append(step)

    def _input(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        value = operation.output
        self.values[value], self.have[value, RequiredType(FLOAT)] = Value(FLOAT, value), value
        self._from_float(operation, value, required_types)

    def _constant(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        assert operation.tensor is not None
        value = self._new(operation.output, RequiredType(FLOAT))
        self.steps.append(Constant(operation.path, (), (value,), value=operation.tensor))
        self._from_float(operation, value, required_types)

    def _float(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        value = self._new(operation.output, RequiredType(FLOAT))
        outputs = (value, operation.coords) if operation.coords else (value,)
        # Modules are copied, as the model may be trained on.
        self.steps.append(
            FloatCall(
                operation.path,
                self._float_args(operation.args),
                outputs,
                self._float_args(operation.kwargs),
                name=operation.what,
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
        for required in required_types:
            if required == RequiredType(FLOAT):
                continue
            made = self._new(operation.output, required)
            called = operation.path, (Ref(value),), (made,)
            if isinstance(required.form, Integers):
                self.steps.append(Quantize(*called, **_stored(required)))
            else:
                reason = "" if _is_float8(operation) else "its input and its readers are float"
                self.steps.append(FloatRelu(*called, ceiling=required.top(), reason=reason))

    def _quantizer(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        form = operation.natural
        assert isinstance(form, Integers)
        value = self.have[operation.args[0].name, RequiredType(form)]
        self.have[operation.output, RequiredType(form)] = value
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
    ) -> None:
        """One more form of a tensor that comes about as integers of this scale."""
        made = self._new(operation.output, required)
        called, stored = (operation.path, (Ref(value),), (made,)), _stored(required)
        scale = torch.as_tensor(scale, dtype=torch.float64)
        step: Step
        if same:
            step = Relu(*called, **stored)
        elif isinstance(required.form, Integers):
            multiplier = scale / required.form.scale
            step = Requantize(*called, multiplier=multiplier, axis=axis, **stored)
        else:
            step = Dequantize(*called, scale=scale, axis=axis, **stored)
        self.steps.append(step)

    def _layer(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        layer = operation.layer
        assert layer is not None
        # A kernel stores one form; several are made of the accumulators, with one rounding each.
        alone = len(required_types) == 1 and _fusable(required_types[0].form)
        stored = required_types[0] if alone else RequiredType(ACCUMULATORS)
        made, form = self._new(operation.output, stored), stored.form
        scale = layer.scale / form.scale if isinstance(form, Integers) else layer.scale
        x = self.have[operation.args[0].name, RequiredType(layer.input)]
        keeps = form == ACCUMULATORS
        step = replace(
            layer.step,
            path=operation.path,
            args=(Ref(x), *operation.args[1:]),
            outputs=(made, operation.coords) if operation.coords else (made,),
            multiplier=None if keeps else scale,
            scale=scale if keeps else None,
            **_stored(stored),
        )
        self.steps.append(step)
        for required in required_types:
            if not alone and required.form != ACCUMULATORS:
                self._converted(operation, made, layer.scale, required, axis=step.channel_axis)

    def _relu(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        source = operation.args[0].name
        for required in required_types:
            value = self.have[source, required.behind_relu(operation.ceiling)]
            self.have[operation.output, required] = value

    def _add(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        refs, scales, axis = [], list[torch.Tensor](), -1
        for operand in operation.args:
            maker = self._made_by[operand.name]
            form = addend_form(maker, self.addends)
            scale: Any = form.scale if isinstance(form, Integers) else None
            if scale is None and maker.layer is not None:
                scale = maker.layer.scale
                axis = maker.layer.step.channel_axis
            refs.append(Ref(self.have[operand.name, RequiredType(form)]))
            scales.append(torch.as_tensor(scale, dtype=torch.float64))
        for required in required_types:
            made = self._new(operation.output, required)
            called = operation.path, tuple(refs), (made,)
            self.steps.append(Add(*called, scales=tuple(scales), axis=axis, **_stored(required)))

    def _weighted_sum(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        source = operation.args[0].name
        natural = self._made_by[source].natural
        assert isinstance(natural, Integers)
        for required in required_types:
            made = self._new(operation.output, required)
            x = Ref(self.have[source, RequiredType(natural)])
            step = _SUMS[operation.what](
                operation.path,
                (x, *self._float_args(operation.args[1:])),
                (made,),
                self._float_args(operation.kwargs),
                scale=natural.scale,
                **_stored(required),
            )
            self.steps.append(step)

    def _matmul(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        refs, scale = [], 1.0
        for operand in operation.args:
            natural = self._made_by[operand.name].natural
            assert isinstance(natural, Integers)
            refs.append(Ref(self.have[operand.name, RequiredType(natural)]))
            scale *= natural.scale
        value = self._new(operation.output, RequiredType(FLOAT))
        called = operation.path, tuple(refs), (value,)
        self.steps.append(Matmul(*called, scale=scale, equation=operation.what))
        self._from_float(operation, value, required_types)

    def _layout(self, operation: Operation, required_types: tuple[RequiredType, ...]) -> None:
        if operation.output not in self.required_types.follows:
            self._from_float(operation, self._moved(operation, RequiredType(FLOAT)), required_types)
            return
        for required in required_types:
            through = required
            if operation.linear:
                # Before it is clamped: the mean of clamped values is another value.
                through = interpolated_form(self._made_by[operation.moved[0]], required)
            if (operation.output, through) not in self.have:
                self._moved(operation, through)
            value = self.have[operation.output, through]
            if through.form != required.form:
                self._from_float(operation, value, (required,))
            elif through != required:  # a ReLU as a step of its own, in the form of its input
                made = self._new(operation.output, required)
                self.steps.append(Relu(operation.path, (Ref(value),), (made,), **_stored(required)))

    def _moved(self, operation: Operation, required: RequiredType) -> str:
        """The move in one form."""
        if operation.what == CAST and isinstance(required.form, Integers):
            self.have[operation.output, required] = self.have[operation.moved[0], required]
            return self.have[operation.output, required]
        made = self._new(operation.output, required)

        def read(ref: Ref) -> Ref:
            if ref.name in self.all.hosts:
                return ref
            moved = ref.name in operation.moved
            return Ref(self.have[ref.name, required if moved else RequiredType(FLOAT)])

        args, kwargs = replaced(operation.args, read), replaced(operation.kwargs, read)
        called = operation.path, args, (made,), kwargs
        step: Step
        if operation.what == "max_pool":
            step = MaxPool(*called)
        elif operation.what == "resize":
            step = Resize(*called)
        else:
            step = LayoutCall(*called, name=operation.what, function=operation.function)
        self.steps.append(step)
        return made


def _is_float8(operation: Operation) -> bool:
    """Whether FP8 numbers make the tensor, whose ReLU an engine does in the same kernel."""
    return isinstance(operation.module, Float8Layer)


def _fusable(form: Form) -> bool:
    """Whether a layer's kernel can store this form itself."""
    return not isinstance(form, Integers) or form.bits in (8, 16) or not form.full


def _stored(required: RequiredType) -> dict[str, Any]:
    """Form and clamps of a step whose stored result includes a ReLU."""
    top, form = required.top(), required.form
    if top is None and isinstance(form, Integers) and not form.full:
        top = form.high
    return {"form": form, "relu": required.relu, "ceiling": top}
