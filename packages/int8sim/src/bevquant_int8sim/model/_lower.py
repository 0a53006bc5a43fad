"""From operations and demands to the steps of a program."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from bevquant_int8sim.model._form import ACCUMULATORS, FLOAT, Demand, Form, Integers
from bevquant_int8sim.model._operation import (
    Demands,
    Operation,
    Operations,
    addend_form,
    find_demands,
)
from bevquant_int8sim.model._program import Program, Ref, SparseRef, Step, Value, replaced
from bevquant_int8sim.model._quantized_layer import Layer

_OUT = {8: "int8", 16: "int16"}
_NAMED_MOVES = ("max_pool", "resize")


def lower(
    operations: Operations, addends: Mapping[str, Integers] | None = None
) -> tuple[Program, dict[fx.Node, dict[Demand, str]]]:
    """The program, and the values that hold each node's tensor, by form.

    Every tensor is made in the forms in which it is wanted, and nothing else.

    Args:
        operations: What the model does.
        addends: Layers' results that sums read as integers of these forms, and not as accumulators.
    """
    addends = addends or {}
    lowering = _Lowering(operations, find_demands(operations, addends), addends)
    program = lowering.run()
    held: dict[fx.Node, dict[Demand, str]] = {}
    for (source, demand), value in lowering.have.items():
        held.setdefault(operations.nodes[source], {})[demand] = value
    return program, held


class _Lowering:
    def __init__(
        self, operations: Operations, demands: Demands, addends: Mapping[str, Integers]
    ) -> None:
        self.all = operations
        self.demands = demands
        self.addends = addends
        self.steps: list[Step] = []
        self.values: dict[str, Value] = {}
        self.have: dict[tuple[str, Demand], str] = {}
        self._natural = {o.output: o.natural for o in operations.operations}
        self._made_by = {o.output: o for o in operations.operations}

    def run(self) -> Program:
        for host in sorted(self.all.hosts & self.demands.hosts):
            self.values[host] = Value("sites" if host.endswith(".sites") else "host", host)
        for operation in self.all.operations:
            demands = self.demands.of.get(operation.output, ())
            if operation.kind in ("host", "sites"):
                if operation.output in self.demands.hosts:
                    self._host(operation)
            elif demands:
                getattr(self, f"_{operation.kind}")(operation, demands)
        return Program(
            signature=self.all.signature,
            sparse_inputs=self.all.sparse_inputs,
            fixed={name: dict(sizes) for name, sizes in self.all.fixed.items() if sizes},
            steps=tuple(self.steps),
            values=self.values,
            result=self._float_args(self.all.result),
        )

    # Values

    def _new(self, source: str, demand: Demand) -> str:
        form = demand.form
        kind = _OUT[8 if form.bits <= 8 else 16] if isinstance(form, Integers) else form
        name = f"{source}:{kind}" + ("+relu" if demand.relu else "")
        while name in self.values:
            name += "'"
        self.values[name] = Value(form, source, demand.relu)
        return name

    def _keep(self, source: str, demand: Demand, value: str) -> None:
        self.have[source, demand] = value

    def _any(self, source: str) -> str:
        return next(value for (name, _), value in self.have.items() if name == source)

    def _float_args(self, values: Any) -> Any:
        """Arguments with every tensor as floats."""

        def read(ref: Ref | SparseRef) -> Ref | SparseRef:
            if isinstance(ref, SparseRef):
                return SparseRef(self.have[ref.features, Demand(FLOAT)], ref.sites)
            return ref if ref.name in self.all.hosts else Ref(self.have[ref.name, Demand(FLOAT)])

        return replaced(values, read)

    # Operations

    def _host(self, operation: Operation) -> None:
        def read(ref: Ref) -> Ref:
            known = ref.name in self.all.hosts
            return (
                ref
                if known
                else Ref(self.have.get((ref.name, Demand(FLOAT)), "") or self._any(ref.name))
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

    def _input(self, operation: Operation, demands: tuple[Demand, ...]) -> None:
        self.values[operation.output] = Value(FLOAT, operation.output)
        self._from_float(operation, operation.output, demands)

    def _constant(self, operation: Operation, demands: tuple[Demand, ...]) -> None:
        assert operation.tensor is not None
        value = self._new(operation.output, Demand(FLOAT))
        tensors = {"value": operation.tensor}
        self.steps.append(Step("constant", operation.path, (), (value,), tensors=tensors))
        self._from_float(operation, value, demands)

    def _float(self, operation: Operation, demands: tuple[Demand, ...]) -> None:
        value = self._new(operation.output, Demand(FLOAT))
        outputs = (value, operation.sites) if operation.sites else (value,)
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
        self._from_float(operation, value, demands)

    def _from_float(self, operation: Operation, value: str, demands: tuple[Demand, ...]) -> None:
        """Everything wanted of a tensor that comes about as floats."""
        source = operation.output
        self._keep(source, Demand(FLOAT), value)
        for demand in demands:
            if demand == Demand(FLOAT):
                continue
            made = self._new(source, demand)
            if isinstance(demand.form, Integers):
                attributes = {**_integers(demand.form), **_limits(demand)}
                step = Step(
                    "quantize", operation.path, (Ref(value),), (made,), attributes=attributes
                )
            else:
                step = Step(
                    "float", operation.path, (Ref(value),), (made,),
                    attributes={"what": "relu", **_limits(demand)},
                    function=torch.relu, reason="its input and its readers are float",
                )  # fmt: skip
            self.steps.append(step)
            self._keep(source, demand, made)

    def _quantizer(self, operation: Operation, demands: tuple[Demand, ...]) -> None:
        form = operation.natural
        assert isinstance(form, Integers)
        value = self.have[operation.args[0].name, Demand(form)]
        self._keep(operation.output, Demand(form), value)
        for demand in demands:
            if demand != Demand(form):
                self._converted(operation, value, form.scale, demand, same=demand.form == form)

    def _converted(
        self,
        operation: Operation,
        value: str,
        scale: Any,
        demand: Demand,
        *,
        same: bool = False,
        axis: int = -1,
        relu: bool = False,
    ) -> None:
        """One more form of a tensor that comes about as integers of this scale."""
        made = self._new(operation.output, demand)
        attributes: dict[str, Any] = {**_limits(demand, relu), "axis": axis}
        scale = torch.as_tensor(scale, dtype=torch.float64)
        tensors = {}
        if same:
            op = "relu"
        elif isinstance(demand.form, Integers):
            op, attributes = "requantize", {**attributes, **_integers(demand.form)}
            tensors = {"multiplier": scale / demand.form.scale}
        else:
            op, tensors = "dequantize", {"scale": scale}
        self.steps.append(
            Step(op, operation.path, (Ref(value),), (made,), attributes=attributes, tensors=tensors)
        )
        self._keep(operation.output, demand, made)

    def _layer(self, operation: Operation, demands: tuple[Demand, ...]) -> None:
        layer = operation.layer
        assert layer is not None
        single = demands[0] if len(demands) == 1 and _fusable(demands[0].form) else None
        made = self._new(operation.output, single or Demand(ACCUMULATORS))
        form: Form = ACCUMULATORS if single is None else single.form
        self.steps.append(
            Step(
                layer.op,
                operation.path,
                self._layer_args(operation, layer),
                (made, operation.sites) if operation.sites else (made,),
                attributes={
                    **layer.settings,
                    "what": operation.what,
                    **_limits(single or Demand(ACCUMULATORS), single is not None and layer.relu),
                    "out": _out(form),
                    "narrow": isinstance(form, Integers) and form.narrow,
                },
                tensors=_layer_tensors(layer, form),
            )
        )
        self._keep(operation.output, single or Demand(ACCUMULATORS), made)
        for demand in demands:
            if single is None and demand.form != ACCUMULATORS:
                axis = layer.settings.get("channel_axis", -1)
                self._converted(operation, made, layer.scale, demand, axis=axis, relu=layer.relu)

    def _layer_args(self, operation: Operation, layer: Layer) -> tuple[Any, ...]:
        x = self.have[operation.args[0].name, Demand(layer.input)]
        return (Ref(x), *operation.args[1:])

    def _relu(self, operation: Operation, demands: tuple[Demand, ...]) -> None:
        source = operation.args[0].name
        for demand in demands:
            value = self.have[source, demand.behind_relu(operation.ceiling)]
            self._keep(operation.output, demand, value)

    def _add(self, operation: Operation, demands: tuple[Demand, ...]) -> None:
        refs, tensors, axis = [], {}, -1
        for index, operand in enumerate(operation.args):
            maker = self._made_by[operand.name]
            wanted = addend_form(maker, self.addends)
            scale: Any = wanted.scale if isinstance(wanted, Integers) else None
            if scale is None and maker.layer is not None:
                scale = maker.layer.scale
                axis = maker.layer.settings.get("channel_axis", -1)
            refs.append(Ref(self.have[operand.name, Demand(wanted)]))
            tensors[f"scale{index}"] = torch.as_tensor(scale, dtype=torch.float64)
        for demand in demands:
            made = self._new(operation.output, demand)
            form = demand.form
            attributes = {**_limits(demand), "axis": axis, "out": _out(form)}
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
            self._keep(operation.output, demand, made)

    def _average(self, operation: Operation, demands: tuple[Demand, ...]) -> None:
        source = operation.args[0].name
        natural = self._natural[source]
        assert isinstance(natural, Integers)
        for demand in demands:
            made = self._new(operation.output, demand)
            form = demand.form
            attributes = {**_limits(demand), "scale": natural.scale, "out": _out(form)}
            if isinstance(form, Integers):
                multiplier = natural.scale / form.scale
                attributes |= {"multiplier": multiplier, "low": form.low, "high": form.high}
            self.steps.append(
                Step(
                    "avg_pool",
                    operation.path,
                    (Ref(self.have[source, Demand(natural)]),),
                    (made,),
                    kwargs=self._float_args(operation.kwargs),
                    attributes=attributes,
                )
            )
            self._keep(operation.output, demand, made)

    def _move(self, operation: Operation, demands: tuple[Demand, ...]) -> None:
        if operation.output not in self.demands.follows:
            self._from_float(operation, self._moved(operation, Demand(FLOAT)), demands)
            return
        for demand in demands:
            through = Demand(demand.form) if operation.linear else demand
            if (operation.output, through) not in self.have:
                self._keep(operation.output, through, self._moved(operation, through))
            if through != demand:
                self._limited(operation, self.have[operation.output, through], demand)

    def _moved(self, operation: Operation, demand: Demand) -> str:
        """The move in one form."""
        made = self._new(operation.output, demand)

        def read(ref: Ref) -> Ref:
            if ref.name in self.all.hosts:
                return ref
            moved = ref.name in operation.moved
            return Ref(self.have[ref.name, demand if moved else Demand(FLOAT)])

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

    def _limited(self, operation: Operation, value: str, demand: Demand) -> None:
        """A ReLU as a step of its own, in the form of its input."""
        made = self._new(operation.output, demand)
        limits = _limits(demand)
        self.steps.append(Step("relu", operation.path, (Ref(value),), (made,), attributes=limits))
        self._keep(operation.output, demand, made)


def _fusable(form: Form) -> bool:
    """Whether a layer's kernel can store this form itself."""
    return not isinstance(form, Integers) or form.bits in (8, 16)


def _limits(demand: Demand, relu: bool = False) -> dict[str, Any]:
    """Attributes of a step that stores what a ReLU makes of its result."""
    limits: dict[str, Any] = {"relu": demand.relu or relu}
    return limits if demand.ceiling is None else limits | {"ceiling": demand.top()}


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
