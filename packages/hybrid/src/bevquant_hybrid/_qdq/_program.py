"""A prepared model in its deployed form, as an integer program for exporters.

Its nodes are read one after the other, as they run on the example.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn import quantized as torch_quantized
from torch.ao.quantization import FakeQuantizeBase
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.proxy import TraceError
from torch.utils._pytree import tree_leaves

from bevquant_graph import Followed
from bevquant_hybrid._convert import refuse_converted
from bevquant_hybrid._fake_quant._fake_quantize import (
    CalibFakeQuantize,
    FakeQuantize,
    _WrappedCalibFakeQuantize,
)
from bevquant_hybrid._fx._recipes import recipe_of
from bevquant_hybrid._fx._scales import deployed, refuse_uncalibrated
from bevquant_hybrid._fx._tracer import (
    HybridTracer,
    called_function,
    called_path,
    number_nodes,
    scope_of,
    trace,
)
from bevquant_hybrid._qdq._modules import (
    SUM,
    Call,
    arithmetic_steps,
    batch_norm,
    changes_its_input,
    form_of,
    function_steps,
    has_tensor,
    held,
    module_steps,
    weighted,
)
from bevquant_hybrid._scale_keeping import rule_of
from bevquant_hybrid.nn import qat
from bevquant_hybrid.nn._functions import Arithmetic
from bevquant_hybrid.nn.qat._composed import Composed
from bevquant_hybrid.nn.qat._weighted import Weighted
from bevquant_hybrid.nn.quantized._weighted import FixedPoint
from bevquant_hybrid.qtensor import QTensor, as_float
from bevquant_int8sim.program import (
    PROGRAM_READERS,
    Constant,
    Dequantize,
    NumberCall,
    Program,
    Quantize,
    Ref,
    Step,
    Value,
    arguments,
    names_in,
)

Observe = Callable[[Step, tuple[Any, ...], tuple[Any, ...]], None]
_CALLER = "export_qdq_onnx"
_NORMS = (qat.BatchNorm2d, qat.BatchNorm3d, qat.SyncBatchNorm)


def read(model: nn.Module, args: Any) -> PreparedProgram:
    """The program of a model that was prepared for calibration or training, and calibrated."""
    refuse_converted(model, _CALLER)
    made = deployed(model)
    # A model of `prepare_qat` has no graph: its forward must be one that can be traced.
    graph = made.graph if isinstance(made, GraphModule) else trace(made, _CALLER)
    graph = _by_parts(made, graph, args)
    refuse_uncalibrated(made, graph, _CALLER)
    return PreparedProgram(made, graph, args)


def _by_parts(model: nn.Module, graph: Graph, args: Any) -> Graph:
    """The graph, with calls of the parts in the place of modules that are composed of them."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    calls = [node for node in calls if _has_parts(model.get_submodule(str(node.target)))]
    if not calls:
        return graph
    paths = {module: path for path, module in model.named_modules()}
    wanted = {node for call in calls for node in call.all_input_nodes}
    values: dict[Node, Any] = {}

    def note(node: Node, given: tuple[Any, ...], result: Any) -> None:
        if node in wanted:
            values[node] = result

    # What a forward decides by its example (its number of axes) is decided in the same way below.
    _follow(model, graph, note, args)
    for node in calls:
        given = tuple(values[source] for source in node.all_input_nodes)
        try:
            made = HybridTracer(_has_parts, paths, given).trace(_OneCall(model, node))
        except (TraceError, TypeError, RuntimeError, ValueError, AttributeError):
            # A forward that cannot be followed stays one call.
            continue
        copies: dict[Node, Any] = {}
        for part in made.nodes:
            if part.op == "placeholder":
                copies[part] = tuple(node.all_input_nodes)
            elif part.op == "output":
                result: Any = map_arg(part.args[0], copies.__getitem__)

                def read(source: Node, call: Node = node, result: Any = result) -> Any:
                    return result if source is call else source

                for user in list(node.users):
                    user.args, user.kwargs = map_arg((user.args, user.kwargs), read)
                found = zip(tree_leaves(result), tree_leaves(values.get(node)), strict=False)
                values.update((new, value) for new, value in found if isinstance(new, Node))
            elif part.target is operator.getitem and isinstance(copies.get(part.args[0]), tuple):
                copies[part] = copies[part.args[0]][part.args[1]]
            else:
                with graph.inserting_before(node):
                    copies[part] = graph.node_copy(part, copies.__getitem__)
                copies[part].meta["line"] = node.meta.get("line", "")
        graph.erase_node(node)
    # The graph of an eager model has no owner, which would say that modules are pure.
    graph.eliminate_dead_code(lambda node: node.op != "call_module" and node.is_impure())
    return graph


def _has_parts(module: nn.Module) -> bool:
    return isinstance(module, Composed) and not module.one_operator


class _OneCall(nn.Module):
    """A call of a graph as a forward; its input is the tuple of the nodes that the call reads."""

    def __init__(self, model: nn.Module, node: Node) -> None:
        super().__init__()
        self._call = (model.get_submodule(str(node.target)), node)

    def forward(self, given: Any) -> Any:
        module, node = self._call
        read = {source: given[i] for i, source in enumerate(node.all_input_nodes)}
        args: Any = map_arg(node.args, read.__getitem__)
        kwargs: Any = map_arg(node.kwargs, read.__getitem__)
        return module(*args, **kwargs)


# Of a converted model `read` says that files are written before converting.
PROGRAM_READERS |= dict.fromkeys((FakeQuantize, CalibFakeQuantize, FixedPoint), read)


class PreparedProgram:
    """A prepared model, step by step."""

    def __init__(self, model: nn.Module, graph: Graph, args: Any) -> None:
        self._model, self._graph = model, graph
        reader = _NodeReader(model, graph)
        _follow(model, graph, reader.read, args)
        self._steps = reader.steps
        inputs = {str(n.target): reader.refs[n] for n in graph.nodes if n.op == "placeholder"}
        positional, named = arguments(args)
        order = list(inputs.values())
        self.names: Mapping[str, str] = dict(reader.inputs)
        self.program = Program(
            signature=(tuple(order[: len(positional)]), {name: inputs[name] for name in named}),
            sparse_inputs={},
            steps=tuple(step for steps in self._steps.values() for step in steps),
            values=reader.values,
            result=reader.result,
        )

    def run(self, inputs: Any, *, observe: Observe) -> Any:
        """Run, and report every step with its results, as integers if they have eight bits."""
        sums: dict[str, Tensor] = {}

        def see(node: Node, given: tuple[Any, ...], result: Any) -> None:
            parts = _converted(given, result)
            for step in self._steps.get(node, ()):
                name = step.outputs[0]
                if name == node.name:
                    value = held(result)
                elif name.endswith(SUM):
                    value = sums[name] = self._sum(node, given)
                elif isinstance(step, Quantize | Dequantize):
                    value = held(next(parts))
                else:
                    continue
                read = tuple(sums.get(getattr(ref, "name", "")) for ref in step.args)
                observe(step, read, (value,))

        return _follow(self._model, self._graph, see, inputs)

    def _sum(self, node: Node, given: tuple[Any, ...]) -> Tensor:
        """What a layer gives before the addition that is fused into it."""
        if node.op == "call_method":
            owner, given = given[0], given[1:]
        else:
            owner = self._model.get_submodule(str(node.target))
        assert isinstance(owner, Weighted)
        return owner.compute(as_float(given[0]))[0]


def _converted(given: tuple[Any, ...], result: Any) -> Iterator[Tensor]:
    """What a boundary makes of a container's tensors that were not in its form yet."""
    for value, made in zip(tree_leaves(given[:1]), tree_leaves(result), strict=False):
        if isinstance(value, QTensor) != isinstance(made, QTensor):
            yield made


def _is_quantized(value: Any, alone: bool) -> bool:
    """Whether a boundary quantizes a value: of a container, no indices."""
    plain = isinstance(value, Tensor) and not isinstance(value, QTensor)
    return plain and (alone or value.is_floating_point())


@torch.no_grad()
def _follow(model: nn.Module, graph: Graph, see: Callable[..., None], inputs: Any) -> Any:
    """Run on a tuple of positional inputs, a dict of named ones, or one input."""

    def show(node: Node, given: Any, result: Any) -> None:
        see(node, given[0], result)

    given = _placed(graph, *arguments(inputs))
    return Followed(model, show, graph).run(*given, enable_io_processing=False)


def _placed(graph: Graph, positional: Any, named: Mapping[str, Any]) -> list[Any]:
    """What a call gives for each parameter of the forward."""
    parameters = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    rest = list(parameters)[len(positional) :]
    missing = [name for name in rest if name not in named and not parameters[name].args]
    if len(positional) > len(parameters) or set(named) - set(rest) or missing:
        raise TypeError(
            f"{_CALLER}: the forward takes {', '.join(parameters)}, and the example has "
            f"{len(positional)} positional inputs and {', '.join(named) or 'no'} named ones; give "
            "a tuple or a dict with what it takes"
        )
    return [*positional, *(named.get(name, *parameters[name].args) for name in rest)]


class _NodeReader:
    """Reads the nodes of a graph as they run."""

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        self.steps: dict[Node, list[Step]] = {}
        self.refs: dict[Node, Any] = {}  # a `Ref`, a container of them, or a constant
        self.values: dict[str, Value] = {}
        self.inputs: dict[str, str] = {}  # input of the program to the parameter that it is
        self.result: Any = None
        self._model, self._graph = model, graph
        self._numbers = number_nodes(graph)
        self._reason = "on the CPU" if getattr(model, "hybrid", False) else "not quantized"
        self._forced: set[str] = set()

    def read(self, node: Node, given: tuple[Any, ...], result: Any) -> None:
        """Read a node that made `result` of `given`."""
        if node.op == "placeholder":
            self.refs[node] = self._input(str(node.target), result, node.name)
        elif node.op == "output":
            self.result = self._refs(node.args[0])
        elif node.op == "get_attr" and isinstance(result, nn.Module):
            self.refs[node] = None  # its methods are called
        else:
            self._read_call(node, given, result)

    def _input(self, called: str, value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {k: self._input(f"{called}[{k!r}]", v, f"{name}_{k}") for k, v in value.items()}
        if isinstance(value, list | tuple):
            parts = [self._input(f"{called}[{i}]", v, f"{name}_{i}") for i, v in enumerate(value)]
            return type(value)(parts)
        if not isinstance(value, Tensor):
            return value
        if value.dtype != torch.float32:
            raise ValueError(
                f"export_qdq_onnx: input {called} is {value.dtype}; expected float32. Give float32 "
                "tensors, and compute what depends on others outside of this model"
            )
        self.inputs[name] = called
        self.values[name] = Value("float", name)
        return Ref(name)

    def _refs(self, value: Any) -> Any:
        return map_arg(value, lambda node: self.refs[node])

    def _read_call(self, node: Node, given: tuple[Any, ...], result: Any) -> None:
        args, kwargs = self._refs(node.args), self._refs(node.kwargs)
        if node.target is operator.getitem and isinstance(args[0], list | tuple | dict):
            self.refs[node] = args[0][args[1]]
            return
        if node.target is getattr and isinstance(args[0], list) and isinstance(given[0], tuple):
            # A field of a named tuple, as `x.max(1).values`.
            index = next(i for i, part in enumerate(given[0]) if part is result)
            self.refs[node] = args[0][index]
            return
        module = self._module(node)
        path = called_path(node) if module is not None else scope_of(node)
        if node.op == "call_method" and module is not None:
            args, given = args[1:], given[1:]
        on_cpu = bool(self._forced.intersection(names_in((args, kwargs))))
        call = Call(node.name, path, args, kwargs, given, result, on_cpu, self._reason)
        found = self._described(node, call, module)
        if isinstance(found, list) and isinstance(found[0], Step):
            self._add(node, found, result, path)
            found = self._made(node.name, result, path)
        self.refs[node] = found

    def _made(self, name: str, result: Any, path: str) -> Any:
        """A value, or the values of a tuple: as exporters name them."""
        if not isinstance(result, list | tuple):
            return Ref(name)
        parts = {f"{name}[{index}]": part for index, part in enumerate(result)}
        self.values.update({n: Value(form_of(part, path), name) for n, part in parts.items()})
        return [Ref(part) for part in parts]

    def _module(self, node: Node) -> nn.Module | None:
        """The module that a node calls, or whose method it calls."""
        path = called_path(node)
        # The place of an arithmetic module holds None, that of a parameter its value.
        if not path or (node.op == "call_method" and self.refs[node.all_input_nodes[0]]):
            return None
        return self._model.get_submodule(path)

    def _described(self, node: Node, call: Call, module: nn.Module | None) -> Any:
        """Steps of a call, or the value that it hands on."""
        if node.op == "get_attr":
            return [call.step(Constant, (), value=call.result.detach())]
        if not has_tensor(call.result):
            return [call.step(NumberCall, call.args, name="number")]
        self._refuse_overwriting(node, call, module)
        if module is not None:
            return self._of_module(node, call, module)
        found = self._one_step(node) if self._is_float(node) else None
        if found is None:
            return function_steps(call, node.target)
        planned = replace(call, args=self._refs(found.args), kwargs=self._refs(found.kwargs))
        if found.target is None:
            return module_steps(planned, found.module)
        return arithmetic_steps(planned, found.target)

    def _one_step(self, node: Node) -> Any:
        """What a float function is as one module, or one call of its method; None for others."""
        recipe = recipe_of(node, self._numbers, set(), lambda _: None)
        if recipe is None or len(recipe.steps) != 1 or recipe.hybrid == "never":
            return None
        step = recipe.steps[0]
        numbers = self._numbers.intersection(a for a in step.args if isinstance(a, Node))
        return None if step.module is None or numbers else step

    def _is_float(self, node: Node) -> bool:
        """Whether a function has no rule for quantized tensors, so that it takes floats."""
        return rule_of(called_function(node)) is None

    def _of_module(self, node: Node, call: Call, module: nn.Module) -> Any:
        if isinstance(module, qat.DeQuantStub):
            return self._dequantized(node, call, module)
        if isinstance(module, qat.QuantStub | FakeQuantizeBase | _WrappedCalibFakeQuantize):
            alone = isinstance(call.given[0], Tensor)
            return self._of_parts(node, call, Quantize, lambda v: _is_quantized(v, alone))
        if isinstance(module, Weighted):
            return weighted(call, module)
        if isinstance(module, _NORMS) and module.weight_fake_quant is not None:
            return batch_norm(call, module)
        if isinstance(module, Arithmetic | torch_quantized.FloatFunctional):
            return arithmetic_steps(call, str(node.target))
        return module_steps(call, module)

    def _dequantized(self, node: Node, call: Call, stub: qat.DeQuantStub) -> Any:
        """Floats, of every tensor in a container."""
        made = self._of_parts(node, call, Dequantize, lambda value: isinstance(value, QTensor))
        if stub.forced:
            self._forced.update(names_in(made))
        return made

    def _of_parts(
        self, node: Node, call: Call, kind: type[Step], wanted: Callable[[Any], bool]
    ) -> Any:
        """A step for each wanted tensor in a container; what the others are stays."""
        steps: list[Step] = []
        results: list[Any] = []

        def of(ref: Any, value: Any, made: Any) -> Any:
            if isinstance(value, list | tuple):
                return [of(*each) for each in zip(ref, value, made, strict=True)]
            if isinstance(value, dict):
                return {key: of(ref[key], part, made[key]) for key, part in value.items()}
            if not wanted(value):
                return ref
            name = f"{node.name}_{len(steps)}" if has_parts else node.name
            stored: dict[str, Any] = {"form": form_of(made, call.path)}
            if kind is Dequantize:
                stored = {"scale": value.scale.detach(), "axis": value.q_per_channel_axis()}
            steps.append(call.step(kind, (ref,), output=name, **stored))
            results.append(made)
            return Ref(name)

        has_parts = not isinstance(call.given[0], Tensor)
        found = of(call.args[0], call.given[0], call.result)
        self._add(node, steps, None, call.path)
        for step, result in zip(steps, results, strict=True):
            name = step.outputs[0]
            self.values[name] = Value(form_of(result, call.path), node.name)
        return found

    def _add(self, node: Node, steps: list[Step], result: Any, path: str) -> None:
        self.steps[node] = steps
        for step in steps:
            name = step.outputs[0]
            form = form_of(result, path) if name == node.name else "float"
            self.values[name] = Value("int32" if name.endswith(SUM) else form, node.name)

    def _refuse_overwriting(self, node: Node, call: Call, module: nn.Module | None) -> None:
        """Refuse a float function that writes into what others read too."""
        what = getattr(node.target, "__name__", str(node.target))
        in_place = getattr(module, "inplace", False) or (
            module is None and changes_its_input(what, node.kwargs)
        )
        reader, source = node, node.args[0] if node.args else None
        while in_place and isinstance(source, Node) and not isinstance(call.result, QTensor):
            if len(source.users) > 1:
                others = [user.name for user in source.users if user is not reader]
                raise ValueError(
                    f"export_qdq_onnx: {call.path or 'the model'}: {what} writes into "
                    f"{source.name}, which {', '.join(others)} reads too; use the form that makes "
                    "a new tensor"
                )
            # What a stub gives lies in the memory of what it takes.
            stub = isinstance(self._module(source), qat.DeQuantStub)
            reader, source = source, source.args[0] if stub else None
