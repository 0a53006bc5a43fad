"""Functions that need a scale of their own become modules that can have one."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, nn
from torch.ao.nn import quantized as torch_quantized
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from bevquant_hybrid._fx._recipes import Recipe, Step, recipe_of
from bevquant_hybrid._fx._tracer import number_nodes, scope_of
from bevquant_hybrid._quant_stub import QuantStub
from bevquant_hybrid.operators import load_support_table, row_of_module
from bevquant_hybrid.partition._placement import Listed, place_operator

__all__ = ["mapper_place", "replace_functions"]


def replace_functions(graph: Graph, root: nn.Module, march: str | None = None) -> list[str]:
    """Replace functions in place by calls of new modules of `root`.

    The module of the k-th ``add`` in the forward of ``features.3`` is named
    ``features_3_generated_add_k``; in the model's own forward ``_generated_add_k``. Sizes, and
    functions that a quantized tensor passes through with its scale, stay as they are. A parameter
    that arithmetic reads gets a `QuantStub`, ``…_generated_quant_k``.

    Args:
        graph: Nodes.
        root: Gets the modules.
        march: Of a hybrid model: functions that its mapper runs on the CPU stay functions.

    Returns:
        The names of the new modules, in the order of execution.
    """
    numbers = number_nodes(graph)
    arithmetic = {
        path for path, m in root.named_modules() if isinstance(m, torch_quantized.FloatFunctional)
    }
    maker = _Maker(graph, root)
    for node in list(graph.nodes):
        if node in numbers:
            continue
        recipe = recipe_of(node, numbers, arithmetic, maker.attribute)
        if recipe is None or not _wanted(recipe, march):
            continue
        maker.replace(node, recipe)
    return maker.names


def _wanted(recipe: Recipe, march: str | None) -> bool:
    """Whether a model has the steps: one for the BPU alone always has."""
    if march is None or recipe.hybrid == "always":
        return True
    called = [step for step in recipe.steps if step.module is not None]
    return recipe.hybrid == "on the BPU" and all(
        mapper_place(step.module, step.target, march).place == "BPU" for step in called
    )


class _Maker:
    """Makes the nodes and modules of recipes."""

    def __init__(self, graph: Graph, root: nn.Module) -> None:
        self.graph, self.root = graph, root
        self.names: list[str] = []
        self._counts: Counter[tuple[str, str]] = Counter()

    def attribute(self, node: Node) -> Any:
        """What a get_attr node reads."""
        value: Any = self.root
        for name in str(node.target).split("."):
            value = getattr(value, name)
        return value

    def replace(self, node: Node, recipe: Recipe) -> None:
        """Put the steps in a node's place."""
        made: dict[Step, Node] = {}
        with self.graph.inserting_before(node):
            for step in recipe.steps:
                made[step] = self._node(step, node, made)
        result = recipe.result
        node.replace_all_uses_with(made[result] if isinstance(result, Step) else result)
        self.graph.erase_node(node)

    def _node(self, step: Step, source: Node, made: dict[Step, Node]) -> Node:
        def known(value: Any) -> Any:
            return made[value] if isinstance(value, Step) else value

        args: Any = map_aggregate(step.args, known)
        kwargs: Any = map_aggregate(step.kwargs, known)
        if step.module is None:
            kind = "call_method" if isinstance(step.target, str) else "call_function"
            node = self.graph.create_node(kind, step.target, args, kwargs)
        else:
            args = tuple(map_aggregate(args, lambda value: self._quantized(value, source)))
            name = self._named(step.operation, step.module, source)
            if step.target is None:
                node = self.graph.call_module(name, args, kwargs)
            else:
                owner = self.graph.get_attr(name)
                owner.meta["scope"] = scope_of(source)
                node = self.graph.call_method(step.target, (owner, *args), kwargs)
        node.meta = dict(source.meta)
        return node

    def _quantized(self, value: Any, source: Node) -> Any:
        """A parameter with a stub behind it; another value as it is."""
        if not (isinstance(value, Node) and value.op == "get_attr"):
            return value
        if not isinstance(self.attribute(value), Tensor):
            return value
        stub = self.graph.call_module(self._named("quant", QuantStub(), source), (value,))
        stub.meta = dict(source.meta)
        return stub

    def _named(self, operation: str, module: nn.Module, source: Node) -> str:
        """Give the root a module under the next free name, and return that."""
        scope = scope_of(source)
        prefix = scope.replace(".", "_")
        name = f"{prefix}_generated_{operation}_{self._counts[scope, operation]}"
        self._counts[scope, operation] += 1
        module.generated_in = scope  # type: ignore[assignment]
        self.root.add_module(name, module)
        self.names.append(name)
        return name


# Methods of FloatFunctional whose operator goes by another name.
_OPERATORS = {"add_relu": "add", "add_scalar": "add", "mul_scalar": "mul"}


def mapper_place(module: nn.Module | None, method: str | None, march: str) -> Listed:
    """Where the mapper of a hybrid model runs a module, or a method of it, and why."""
    row = f"torch.{_OPERATORS.get(method, method)}" if method else ""
    if not row and module is not None:
        row = row_of_module(module, load_support_table())
    return place_operator(row, march)
