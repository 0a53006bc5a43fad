"""One node after the other as steps of a program."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn import quantized as torch_quantized
from torch.ao.quantization import FakeQuantizeBase
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from bevquant_hybrid._fake_quant._fake_quantize import _WrappedCalibFakeQuantize
from bevquant_hybrid._fx._recipes import recipe_of
from bevquant_hybrid._fx._tracer import number_nodes, scope_of
from bevquant_hybrid._qdq._call import SUM, Call, form_of, has_tensor
from bevquant_hybrid._qdq._modules import (
    arithmetic_steps,
    batch_norm,
    changes_its_input,
    function_steps,
    module_steps,
    weighted,
)
from bevquant_hybrid._scale_keeping import rule_of
from bevquant_hybrid.nn import qat
from bevquant_hybrid.nn._arithmetic import Arithmetic
from bevquant_hybrid.nn.qat._weighted import Weighted
from bevquant_hybrid.qtensor import QTensor
from bevquant_int8sim.program import Ref, Step, Value, names_in

_NORMS = (qat.BatchNorm2d, qat.BatchNorm3d, qat.SyncBatchNorm)


class NodeReader:
    """Reads the nodes of a graph as they run.

    Args:
        model: The model, as it will be deployed.
        graph: Its calls.

    Attributes:
        steps: Node to its steps.
        refs: Node to its value: a `Ref`, a container of them, or a constant.
        values: Name to form.
        inputs: Input of the program to the parameter that it is.
        result: What the model returns.
    """

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        self.steps: dict[Node, list[Step]] = {}
        self.refs: dict[Node, Any] = {}
        self.values: dict[str, Value] = {}
        self.inputs: dict[str, str] = {}
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
        module = self._module(node)
        owner = node.args[0] if node.op == "call_method" and module else None
        path = str(owner.target) if isinstance(owner, Node) else ""
        path = path or (str(node.target) if module is not None else scope_of(node))
        if node.op == "call_method" and module is not None:
            args, given = args[1:], given[1:]
        on_cpu = bool(self._forced.intersection(names_in((args, kwargs))))
        call = Call(node.name, path, args, kwargs, given, result, on_cpu, self._reason)
        found = self._described(node, call, module)
        if isinstance(found, list) and isinstance(found[0], Step):
            self._add(node, found, result, path)
            found = Ref(node.name)
        self.refs[node] = found

    def _module(self, node: Node) -> nn.Module | None:
        """The module that a node calls, or whose method it calls."""
        if node.op == "call_module":
            return self._model.get_submodule(str(node.target))
        owner = node.args[0] if node.op == "call_method" and node.args else None
        if isinstance(owner, Node) and owner.op == "get_attr" and self.refs[owner] is None:
            return self._model.get_submodule(str(owner.target))
        return None

    def _described(self, node: Node, call: Call, module: nn.Module | None) -> Any:
        """Steps of a call, or the value that it hands on."""
        if node.op == "get_attr":
            return [call.step("constant", "constant", (), tensors={"value": call.result})]
        if not has_tensor(call.result):
            return [call.step("host", "host", call.args)]
        self._refuse_overwriting(node, call, module)
        if module is not None:
            return self._of_module(node, call, module)
        found = self._one_step(node) if self._is_float(node) else None
        if found is None:
            return function_steps(call, node.target)
        planned = Call(
            call.name, call.path, self._refs(found.args), self._refs(found.kwargs), call.given,
            call.result, call.on_cpu, call.reason,
        )  # fmt: skip
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
        function: Any = node.target
        if node.op == "call_method":
            function = getattr(Tensor, str(node.target), None)
        return rule_of(function) is None

    def _of_module(self, node: Node, call: Call, module: nn.Module) -> Any:
        if isinstance(module, qat.DeQuantStub):
            return self._dequantized(node, call, module)
        if isinstance(module, qat.QuantStub | FakeQuantizeBase | _WrappedCalibFakeQuantize):
            if isinstance(call.given[0], QTensor):
                return call.args[0]
            return [call.step("quantize", "quantize", call.args)]
        if isinstance(module, Weighted):
            return weighted(call, module)
        if isinstance(module, _NORMS) and module.weight_fake_quant is not None:
            return batch_norm(call, module)
        if isinstance(module, Arithmetic | torch_quantized.FloatFunctional):
            return arithmetic_steps(call, str(node.target))
        return module_steps(call, module)

    def _dequantized(self, node: Node, call: Call, stub: qat.DeQuantStub) -> Any:
        """Floats, of every tensor in a container."""
        steps: list[Step] = []

        def of(ref: Any, value: Any) -> Any:
            if isinstance(value, list | tuple):
                parts = ref
                if isinstance(ref, Ref):
                    parts = [Ref(f"{ref.name}[{i}]") for i in range(len(value))]
                return [of(r, v) for r, v in zip(parts, value, strict=True)]
            if isinstance(value, dict):
                return {key: of(ref[key], part) for key, part in value.items()}
            if not isinstance(value, QTensor):
                return ref
            name = f"{node.name}_{len(steps)}" if has_parts else node.name
            steps.append(call.step("dequantize", "dequantize", (ref,), output=name))
            return Ref(name)

        has_parts = not isinstance(call.given[0], Tensor)
        made = of(call.args[0], call.given[0])
        self._add(node, steps, None, call.path)
        if stub.forced:
            self._forced.update(names_in(made))
        return made

    def _add(self, node: Node, steps: list[Step], result: Any, path: str) -> None:
        self.steps[node] = steps
        for step in steps:
            name = step.outputs[0]
            form = form_of(result, path) if name == node.name else "float"
            self.values[name] = Value("int32" if name.endswith(SUM) else form, node.name)

    def _refuse_overwriting(self, node: Node, call: Call, module: nn.Module | None) -> None:
        """Refuse a float function that writes into what others read too.

        Raises:
            ValueError: It does.
        """
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
