"""Placement of a model's nodes on BPU and CPU, with reasons."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from bevquant_hybrid._fx._float_operators import BOUNDARY, insert_boundaries
from bevquant_hybrid._fx._graph_module import copied_graph
from bevquant_hybrid._fx._placement import Kind, Placement
from bevquant_hybrid._fx._settings import anchor_path_of, class_of
from bevquant_hybrid._fx._tracer import number_nodes
from bevquant_hybrid.nn.qat import is_qat
from bevquant_hybrid.nn.quantized.quantize import is_fixed_point
from bevquant_hybrid.operators import load_support_table, row_of_function, row_of_module
from bevquant_hybrid.operators._table import place_operator, requested_placement
from bevquant_hybrid.partition._plan import Plan, PlanNode, number_segments
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.undisturbed import Followed, positional, undisturbed

_EDGES = {"placeholder": "input", "output": "output", "get_attr": "attribute"}
# Views of their input, if the march supports them.
_PASSING = (
    *("torch.nn.Identity", "torch.nn.Dropout", "torch.nn.Dropout2d", "torch.Tensor.reshape"),
    *("torch.Tensor.transpose", "torch.Tensor.getitem"),
)


@dataclass(frozen=True)
class GraphNode:
    """A node before its placement."""

    name: str  # the graph node's name
    kind: str  # input, output, attribute, operator, quantize or dequantize
    operator: str  # its row of the support table, or its plain name
    path: str  # its module; for a function, the module whose forward calls it
    # Paths and classes of the modules around it, itself included
    around: tuple[tuple[str, type[nn.Module]], ...]
    shape: tuple[int, ...] | None  # of its result, where known
    switched_off: bool  # whether its module's qconfig is None
    # In a graph that is prepared already, whether its module is one that prepare or convert
    # made; None in a float graph
    quantized: bool | None = None
    dtype: str = ""  # of the integers of its result, where a run showed some; else ""


def read_graph(module: fx.GraphModule, example_inputs: tuple[Any, ...] | None) -> list[GraphNode]:
    """Records of all nodes in order; shapes from ``example_inputs``, else from the nodes' meta."""
    results = _results(module, example_inputs) if example_inputs is not None else {}
    modules = dict(module.named_modules(remove_duplicate=False))
    owners = {
        node.name
        for node in module.graph.nodes
        if node.op == "get_attr" and str(node.target) in modules
    }
    called = {str(n.target) for n in module.graph.nodes if n.op == "call_module"} | {
        str(n.target) for n in module.graph.nodes if n.name in owners
    }
    prepared = any(_is_quantized(modules[path]) for path in called)
    # Objects whose method the next node calls, sizes and what is computed of them: no tensors.
    aside = owners | {node.name for node in number_nodes(module.graph)}
    records = []
    for node in module.graph.nodes:
        if node.name in aside:
            continue
        kind, operator, path = _describe(node, modules, owners)
        around = _around(node, path, modules)
        own = modules.get(path) if node.op in ("call_module", "call_method") else None
        shape, dtype = results.get(node.name) or (_shape_in_meta(node), "")
        records.append(
            GraphNode(
                *(node.name, kind, operator, path, around),
                shape,
                switched_off=own is not None and getattr(own, "qconfig", 0) is None,
                quantized=_is_quantized(own) if prepared else None,
                dtype=dtype,
            )
        )
    return records


def _is_quantized(module: nn.Module | None) -> bool:
    """Whether prepare or convert made the module: a QAT or fixed-point form."""
    return is_fixed_point(module) or is_qat(module)


def _describe(
    node: fx.Node, modules: dict[str, nn.Module], owners: set[str]
) -> tuple[str, str, str]:
    table = load_support_table()
    if node.op in _EDGES:
        return _EDGES[node.op], "", str(node.target) if node.op == "get_attr" else ""
    if node.op == "call_module":
        called = modules[str(node.target)]
        operator = row_of_module(called, table) or f"torch.nn.{type(called).__name__}"
        stub = operator.rpartition(".")[2]
        if stub == "QuantStub" or node.name.endswith("_activation_post_process"):
            return "quantize", operator, str(node.target)
        return "dequantize" if stub == "DeQuantStub" else "operator", operator, str(node.target)
    owner = node.args[0] if node.args else None
    if isinstance(owner, fx.Node) and owner.name in owners:  # a FloatFunctional's method
        base = str(node.target).removesuffix("_scalar").removesuffix("_relu")
        row = table.find(f"torch.{base}")
        return "operator", row.name if row else f"torch.{base}", str(owner.target)
    function: Any = node.target
    if node.op == "call_method":
        function = getattr(Tensor, str(node.target), str)
    name = str(node.target) if node.op == "call_method" else getattr(function, "__name__", "")
    tensors = len(node.all_input_nodes)
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = stack[-1][0] if stack else ""
    return "operator", row_of_function(function, name, table, tensors), path


def _around(
    node: fx.Node, path: str, modules: dict[str, nn.Module]
) -> tuple[tuple[str, type[nn.Module]], ...]:
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
    return tuple((p, cls) for p, cls in found.items() if p)


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
        ValueError: If the march or a key of ``hybrid_dict`` is unknown, or its value is no list.
    """
    names, types = requested_placement(hybrid_dict)
    given = example_inputs is not None
    records = read_graph(graph_module, positional(graph_module, example_inputs) if given else None)
    notes = _unmatched(records, graph_module, names, types)
    state = _State(load_support_table().march(march).name, records)
    graph = copied_graph(graph_module.graph)
    for node in graph.nodes:
        state.place(node, names, types)
    insert_boundaries(graph, nn.Module(), state, lambda node: nn.Identity())
    notes += state.unquantized(graph)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return Plan(state.march, number_segments(state.plan_nodes(graph)), tuple(notes))


def _unmatched(
    records: list[GraphNode],
    graph_module: fx.GraphModule,
    names: tuple[str, ...],
    types: tuple[type[nn.Module], ...],
) -> list[str]:
    paths = {path for record in records for path, _ in record.around}
    modules = {path for path, _ in graph_module.named_modules(remove_duplicate=False)}
    classes = {cls for record in records for _, cls in record.around}
    notes = []
    for name in names:
        if name not in paths:
            near = difflib.get_close_matches(name, sorted(paths), n=3, cutoff=0.4)
            hint = f"; names near it: {', '.join(near)}" if near else ""
            what = "no module is called" if name not in modules else "no node is in the module"
            notes.append(f"hybrid_dict: {what} {name!r}{hint}")
    for cls in types:
        if cls not in classes:
            notes.append(f"hybrid_dict: no module of class {cls.__name__} is called")
    return notes


_ROLES = {Kind.PASS: "pass", Kind.BPU: "operator", Kind.CPU: "operator"}


class _State(Placement):
    """Where the nodes of a graph run, by the mapper's list alone."""

    def __init__(self, march: str, records: list[GraphNode]) -> None:
        self.march = march
        self.records = {record.name: record for record in records}
        self.kinds: dict[fx.Node, Kind] = {}
        self.reasons: dict[fx.Node, str] = {}

    def place(
        self, node: fx.Node, names: tuple[str, ...], types: tuple[type[nn.Module], ...]
    ) -> None:
        """Decide the kind of one node, which stands after all that it reads."""
        record = self.records.get(node.name)
        found = (Kind.NUMBER, "") if record is None else self._decide(node, record, names, types)
        self.kinds[node], self.reasons[node] = found

    def _decide(
        self,
        node: fx.Node,
        record: GraphNode,
        names: tuple[str, ...],
        types: tuple[type[nn.Module], ...],
    ) -> tuple[Kind, str]:
        if record.kind in ("input", "output", "attribute"):
            return Kind.EDGE, ""
        if record.kind == "quantize":
            return Kind.QUANT, "the model quantizes here"
        if record.kind == "dequantize":
            return Kind.DEQUANT, "the model dequantizes here"
        for path, cls in record.around:
            if path in names:
                return Kind.CPU, f"hybrid_dict names {path}"
            if cls in types:
                return Kind.CPU, f"hybrid_dict names the class {cls.__name__} of {path}"
        if record.switched_off:
            return Kind.CPU, f"the qconfig of {record.path} is None"
        if record.quantized:
            return Kind.BPU, "the prepared model quantizes it"
        if record.quantized is False and not any(map(self._is_integer, self.inputs(node))):
            return Kind.CPU, "the prepared model leaves it in float"
        listed = place_operator(record.operator, self.march)
        reason = f"{record.operator}: {listed.because}"
        if listed.place == "CPU":
            return Kind.CPU, reason
        if record.operator in _PASSING and self.inputs(node):
            return Kind.PASS, "it passes on what it reads, where that is"
        return Kind.BPU, reason

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """Tensors that a node reads, each once."""
        return [n for n in node.all_input_nodes if self.kinds[n] is not Kind.NUMBER]

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
                boundary = node.name not in self.records
                made[node] = self._boundary(node, made) if boundary else self._plan_node(node)
        return [*made.values()]

    def _plan_node(self, node: fx.Node) -> PlanNode:
        record, kind = self.records[node.name], self.kinds[node]
        bpu = self._is_integer(node) if kind is Kind.PASS else kind is Kind.BPU
        place = "" if kind is Kind.EDGE else "BPU" if bpu else "CPU"
        about = place, self.reasons[node], record.operator, record.path
        inputs = tuple(n.name for n in self.inputs(node))
        role = _ROLES.get(kind, record.kind)
        return PlanNode(node.name, role, *about, inputs, record.shape, dtype=record.dtype)

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
