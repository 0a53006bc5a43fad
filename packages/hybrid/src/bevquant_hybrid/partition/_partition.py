"""Placement of a model's nodes on BPU and CPU, with reasons."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, fx, nn

from bevquant_graph import Followed
from bevquant_hybrid._fx._float_operators import BOUNDARY, insert_boundaries
from bevquant_hybrid._fx._graph_module import copied_graph
from bevquant_hybrid._fx._placement import Kind, Placement
from bevquant_hybrid._fx._settings import Names, anchor_path_of, class_of
from bevquant_hybrid._fx._tracer import called_function, called_path, number_nodes
from bevquant_hybrid.nn.qat import is_qat
from bevquant_hybrid.nn.quantized.quantize import is_fixed_point
from bevquant_hybrid.operators import (
    is_identity,
    load_support_table,
    row_of_function,
    row_of_module,
)
from bevquant_hybrid.operators._table import place_operator
from bevquant_hybrid.partition._plan import Plan, PlanNode, number_segments
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.undisturbed import positional, undisturbed

_EDGES = {"placeholder": "input", "output": "output", "get_attr": "attribute"}
# Views of their input, if the march supports them.
_VIEWS = ("torch.Tensor.reshape", "torch.Tensor.transpose", "torch.Tensor.getitem")


def _is_quantized(module: nn.Module | None) -> bool:
    """Whether prepare or convert made the module: a QAT or fixed-point form."""
    return is_fixed_point(module) or is_qat(module)


def _describe(node: fx.Node, modules: Mapping[str, nn.Module]) -> tuple[str, str, str]:
    """Kind, operator (the row of the table, or the plain name) and path of a node."""
    if node.op in _EDGES:
        return _EDGES[node.op], "", str(node.target) if node.op == "get_attr" else ""
    path = called_path(node)
    if node.op == "call_module":
        called = modules[path]
        operator = row_of_module(called) or f"torch.nn.{type(called).__name__}"
        stub = operator.rpartition(".")[2]
        if stub == "QuantStub" or node.name.endswith("_activation_post_process"):
            return "quantize", operator, path
        return "dequantize" if stub == "DeQuantStub" else "operator", operator, path
    if path and path in modules:  # a FloatFunctional's method
        return "operator", row_of_module(modules[path], str(node.target)), path
    # A function's path is that of the module whose forward calls it.
    function = called_function(node) or str
    name = str(node.target) if node.op == "call_method" else getattr(function, "__name__", "")
    stack = list(node.meta.get("nn_module_stack", {}).values())
    operator = row_of_function(function, name, len(node.all_input_nodes))
    return "operator", operator, stack[-1][0] if stack else ""


def _around(
    node: fx.Node, path: str, modules: Mapping[str, nn.Module]
) -> dict[str, type[nn.Module]]:
    """Paths and classes of the modules around a node, its own included."""
    found: dict[str, type[nn.Module]] = {}
    for entry in node.meta.get("nn_module_stack", {}).values():
        found[str(entry[0])] = entry[1] if isinstance(entry[1], type) else type(entry[1])
    paths = [path]
    if path in modules:
        # A fused module has its layer's name and class.
        own = modules[path]
        kind = class_of(own)
        found[path] = found.get(path, kind) if kind is type(own) else kind
        paths.append(anchor_path_of(own, path))
        found.setdefault(paths[-1], kind)
    for inner in paths:
        parts = inner.split(".")
        for i in range(1, len(parts)):
            outer = ".".join(parts[:i])
            if outer in modules:
                found.setdefault(outer, type(modules[outer]))
    # Around every node is the model itself, which no entry of `hybrid_dict` means.
    found.pop("", None)
    return found


def _shape_in_meta(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("tensor_meta", node.meta.get("val"))
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(int(size) for size in shape)


def _results(
    module: fx.GraphModule, inputs: tuple[Any, ...]
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and integer type of every tensor, by the name of its node."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}

    def see(node: fx.Node, given: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            dtype = str(result.dtype) if isinstance(result, QTensor) else ""
            found[node.name] = tuple(int(size) for size in result.shape), dtype

    with undisturbed(module):
        Followed(module, see).run(*inputs)
    return found


def partition(
    graph_module: fx.GraphModule,
    march: str,
    hybrid_dict: Mapping[str, Iterable[Any]] | None = None,
    *,
    example_inputs: Any = None,
) -> Plan:
    """Plan the placement of each node, and the quantize and dequantize boundaries.

    A node runs on the CPU if the mapper's list has no BPU form of it for the march, if
    ``hybrid_dict`` names it or a module around it, or if its module's ``qconfig`` is None. A CPU
    node with a BPU consumer, directly or through nodes that pass values on, gets a quantize
    boundary ``<node>_activation_post_process`` on its output. An integer input of a CPU node gets a
    dequantize boundary ``<node>_input_dequant_<i>``. CPU consumers keep the float value.

    Args:
        graph_module: Float graph, traced with QuantStubs and DeQuantStubs as leaves; or a prepared
            or converted graph, whose modules define the placement. It is not changed.
        march: ``"bernoulli2"``, ``"bayes"`` or ``"bayes-e"``.
        hybrid_dict: ``{"module_name": ["a.b", …], "module_type": [nn.Conv2d, …]}``: modules to run
            on the CPU, with their submodules.
        example_inputs: One tensor, or a tuple or list of arguments, for shapes and transfer bytes.
            Without them, the nodes' ``tensor_meta`` is used, if available. Integers of a prepared
            or converted graph count with their width, those of a float graph as int8.

    Returns:
        The plan. Unmatched names and classes of ``hybrid_dict``, and operators with an unquantized
        input, are in its warnings and also emitted as warnings.

    Raises:
        TypeError: If ``hybrid_dict`` holds no lists of names and classes.
        ValueError: If the march or a key of ``hybrid_dict`` is unknown.
    """
    names = Names(hybrid_dict)
    title = load_support_table().march(march).name
    results = {}
    if example_inputs is not None:
        results = _results(graph_module, positional(graph_module, example_inputs))
    graph = copied_graph(graph_module.graph)
    state = _State(graph, graph_module, title, names, results)
    notes = state.unmatched()
    insert_boundaries(graph, nn.Module(), state, lambda node: nn.Identity())
    notes += state.unquantized(graph)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return Plan(state.march, number_segments(state.plan_nodes(graph)), tuple(notes))


_ROLES = {Kind.PASS: "pass", Kind.BPU: "operator", Kind.CPU: "operator"}


class _State(Placement):
    """Where the nodes of a graph run, by the mapper's list alone."""

    def __init__(
        self,
        graph: fx.Graph,
        root: nn.Module,
        march: str,
        names: Names,
        results: Mapping[str, tuple[tuple[int, ...], str]],
    ) -> None:
        self.march, self.names, self._results = march, names, results
        self.modules = dict(root.named_modules(remove_duplicate=False))
        self.kinds: dict[fx.Node, Kind] = {}
        self.reasons: dict[fx.Node, str] = {}
        self._calls: dict[fx.Node, tuple[str, str, str]] = {}  # as `_describe` returns them
        self._around: dict[fx.Node, dict[str, type[nn.Module]]] = {}
        called = filter(None, map(called_path, graph.nodes))
        self._prepared = any(_is_quantized(self.modules.get(path)) for path in called)
        # Numbers, and objects whose method the next node calls, are no tensors.
        numbers = number_nodes(graph)
        for node in graph.nodes:
            self.kinds[node], self.reasons[node] = Kind.NUMBER, ""
            if node in numbers or self._is_owner(node):
                continue
            self._calls[node] = _describe(node, self.modules)
            self._around[node] = _around(node, self._calls[node][2], self.modules)
            self.kinds[node], self.reasons[node] = self._decide(node)

    def _decide(self, node: fx.Node) -> tuple[Kind, str]:
        kind, operator, path = self._calls[node]
        if kind in ("input", "output", "attribute"):
            return Kind.EDGE, ""
        if kind == "quantize":
            return Kind.QUANT, "the model quantizes here"
        if kind == "dequantize":
            return Kind.DEQUANT, "the model dequantizes here"
        for outer, cls in self._around[node].items():
            if outer in self.names.names:
                return Kind.CPU, f"hybrid_dict names {outer}"
            if cls in self.names.types:
                return Kind.CPU, f"hybrid_dict names the class {cls.__name__} of {outer}"
        own = self.modules.get(path) if node.op in ("call_module", "call_method") else None
        if own is not None and getattr(own, "qconfig", 0) is None:
            return Kind.CPU, f"the qconfig of {path} is None"
        if self._prepared and _is_quantized(own):
            return Kind.BPU, "the prepared model quantizes it"
        if self._prepared and not any(map(self._is_integer, self.inputs(node))):
            return Kind.CPU, "the prepared model leaves it in float"
        listed = place_operator(operator, self.march)
        reason = f"{operator}: {listed.because}"
        if listed.place == "CPU":
            return Kind.CPU, reason
        if (operator in _VIEWS or is_identity(operator)) and self.inputs(node):
            return Kind.PASS, "it passes on what it reads, where that is"
        return Kind.BPU, reason

    def unmatched(self) -> list[str]:
        """A warning for each name and class of `hybrid_dict` that no call has."""
        notes = []
        paths = {path for around in self._around.values() for path in around}
        for name in self.names.names:
            if name not in paths:
                near = difflib.get_close_matches(name, sorted(paths), n=3, cutoff=0.4)
                hint = f"; names near it: {', '.join(near)}" if near else ""
                known = name in self.modules
                what = "no node is in the module" if known else "no module is called"
                notes.append(f"hybrid_dict: {what} {name!r}{hint}")
        classes = {cls for around in self._around.values() for cls in around.values()}
        for cls in self.names.types:
            if cls not in classes:
                notes.append(f"hybrid_dict: no module of class {cls.__name__} is called")
        return notes

    def forced(self, node: fx.Node) -> bool:
        """Nothing is written into a file."""
        return False

    def _is_integer(self, node: fx.Node) -> bool:
        return self.kinds[self.source(node)] in (Kind.BPU, Kind.QUANT)

    def unquantized(self, graph: fx.Graph) -> list[str]:
        """A warning for each BPU node that reads floats from outside."""
        return [
            f"{node.name} runs on the BPU and reads {origin.name}, which is float; insert a "
            "QuantStub between them"
            for node in graph.nodes
            if self.kinds[node] is Kind.BPU
            for origin in map(self.source, self.inputs(node))
            if self.kinds[origin] is Kind.DEQUANT or origin.op == "placeholder"
        ]

    def plan_nodes(self, graph: fx.Graph) -> list[PlanNode]:
        """All nodes in order; what passes a value on stands where the value is."""
        made: dict[fx.Node, PlanNode] = {}
        for node in graph.nodes:
            if self.kinds[node] is not Kind.NUMBER:
                boundary = node not in self._calls
                made[node] = self._boundary(node, made) if boundary else self._plan_node(node)
        return [*made.values()]

    def _plan_node(self, node: fx.Node) -> PlanNode:
        described, kind = self._calls[node], self.kinds[node]
        bpu = self._is_integer(node) if kind is Kind.PASS else kind is Kind.BPU
        place = "" if kind is Kind.EDGE else "BPU" if bpu else "CPU"
        about = place, self.reasons[node], *described[1:]
        inputs = tuple(n.name for n in self.inputs(node))
        shape, dtype = self._results.get(node.name) or (_shape_in_meta(node), "")
        role = _ROLES.get(kind, described[0])
        return PlanNode(node.name, role, *about, inputs, shape, dtype=dtype)

    def _boundary(self, node: fx.Node, made: dict[fx.Node, PlanNode]) -> PlanNode:
        kind, source = node.meta[BOUNDARY], made[node.all_input_nodes[0]]
        readers = " and ".join(user.name for user in node.users)
        stub, reason = "QuantStub", f"{source.name} computes floats, {readers} reads integers"
        if kind == "dequantize":
            stub, reason = "DeQuantStub", f"{source.name} is integers, {readers} computes floats"
        return PlanNode(
            *(node.name, kind, "CPU", reason, f"torch.quantization.{stub}", node.name),
            *((source.name,), source.shape),
            inserted=True,
            dtype=source.dtype if kind == "quantize" else "",
        )
