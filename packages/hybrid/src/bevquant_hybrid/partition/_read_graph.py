"""Read an fx graph into plain records: what each node computes, where it stands, its shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from bevquant_hybrid._fx._settings import anchor_path_of, class_of
from bevquant_hybrid._fx._tracer import number_nodes
from bevquant_hybrid._undisturbed import undisturbed
from bevquant_hybrid.nn.quantized.quantize import is_fixed_point
from bevquant_hybrid.operators import load_support_table, row_of_function, row_of_module
from bevquant_hybrid.qtensor import QTensor

__all__ = ["GraphNode", "read_graph"]


@dataclass(frozen=True)
class GraphNode:
    """A node before it has a place.

    Attributes:
        name: The graph node's name.
        kind: ``input``, ``output``, ``attribute``, ``operator``, ``quantize`` or ``dequantize``.
        operator: Its row of the support table, or its plain name.
        path: Its module; of a function, the module in whose forward it stands.
        around: Paths and classes of the modules around it, itself included.
        inputs: Names of the tensors' nodes that it reads, each once.
        shape: Of its result, where known.
        switched_off: Whether its module has the qconfig None.
        quantized: In a graph that is prepared already, whether its module is one that prepare or
            convert made; None in a float graph.
        dtype: Of the integers of its result, where a run showed some; else ``""``.
    """

    name: str
    kind: str
    operator: str
    path: str
    around: tuple[tuple[str, type[nn.Module]], ...]
    inputs: tuple[str, ...]
    shape: tuple[int, ...] | None
    switched_off: bool
    quantized: bool | None = None
    dtype: str = ""


def read_graph(module: fx.GraphModule, example_inputs: tuple[Any, ...] | None) -> list[GraphNode]:
    """Records of all nodes in order; shapes from ``example_inputs``, else from the nodes' meta."""
    results = _Results(module).of(example_inputs) if example_inputs is not None else {}
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
                tuple(n.name for n in node.all_input_nodes if n.name not in aside),
                shape,
                switched_off=own is not None and getattr(own, "qconfig", 0) is None,
                quantized=_is_quantized(own) if prepared else None,
                dtype=dtype,
            )
        )
    return records


def _is_quantized(module: nn.Module | None) -> bool:
    """Whether prepare or convert made the module: a QAT or fixed-point form."""
    return is_fixed_point(module) or type(module).__module__.startswith(_QAT)


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
    function: Callable[..., Any] = (
        getattr(Tensor, str(node.target), str) if node.op == "call_method" else node.target  # type: ignore[assignment]
    )
    name = str(node.target) if node.op == "call_method" else getattr(function, "__name__", "")
    tensors = len(node.all_input_nodes)
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = stack[-1][0] if stack else ""
    return "operator", row_of_function(function, name, table, tensors), path


_PACKAGE = __package__.partition(".")[0]
_QAT = f"{_PACKAGE}.nn.qat."
_EDGES = {"placeholder": "input", "output": "output", "get_attr": "attribute"}


def _around(
    node: fx.Node, path: str, modules: dict[str, nn.Module]
) -> tuple[tuple[str, type[nn.Module]], ...]:
    found: dict[str, type[nn.Module]] = {}
    for entry in node.meta.get("nn_module_stack", {}).values():
        found[str(entry[0])] = entry[1] if isinstance(entry[1], type) else type(entry[1])
    paths = [path]
    if path in modules:
        # What was fused goes by its layer: at that layer's name, and as of that layer's class.
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


class _Results(fx.Interpreter):
    """Runs the graph and notes shape and integer type of every tensor."""

    def of(self, inputs: tuple[Any, ...]) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and integer types by node name."""
        self._found: dict[str, tuple[tuple[int, ...], str]] = {}
        with undisturbed(self.module):
            self.run(*inputs)
        return self._found

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            dtype = str(result.dtype) if isinstance(result, QTensor) else ""
            self._found[n.name] = tuple(int(size) for size in result.shape), dtype
        return result
