"""Modules of several quantized parts, replaced by calls of the parts, which round."""

from __future__ import annotations

import operator
from typing import Any

from torch import nn
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import TraceError
from torch.utils._pytree import tree_leaves

from bevquant_hybrid._fx._tracer import HybridTracer
from bevquant_hybrid.nn.qat._composed import Composed


def composed_calls(model: nn.Module, graph: Graph) -> list[Node]:
    """The calls of modules whose parts have scales that a file can hold."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    return [node for node in calls if _has_parts(model.get_submodule(str(node.target)))]


def inline(model: nn.Module, graph: Graph, values: dict[Node, Any]) -> None:
    """Replace calls of composed modules by calls of their parts.

    What a forward decides by its example (its number of axes) is decided in the same way. A
    forward that cannot be followed stays one call.
    """
    for node in composed_calls(model, graph):
        given = tuple(values[source] for source in node.all_input_nodes)
        try:
            made = _PartsTracer(model, given).trace(_OneCall(model, node))
        except (TraceError, TypeError, RuntimeError, ValueError, AttributeError):
            continue
        copies: dict[Node, Any] = {}
        for part in made.nodes:
            if part.op == "placeholder":
                copies[part] = tuple(node.all_input_nodes)
            elif part.op == "output":
                result = map_arg(part.args[0], copies.__getitem__)
                for user in list(node.users):
                    _read_instead(user, node, result)
                found = zip(tree_leaves(result), tree_leaves(values.get(node)), strict=False)
                values.update((new, value) for new, value in found if isinstance(new, Node))
            elif part.target is operator.getitem and isinstance(copies.get(part.args[0]), tuple):
                copies[part] = copies[part.args[0]][part.args[1]]
            else:
                with graph.inserting_before(node):
                    copies[part] = graph.node_copy(part, copies.__getitem__)
                copies[part].meta["line"] = node.meta.get("line", "")
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _has_parts(module: nn.Module) -> bool:
    return isinstance(module, Composed) and not module.one_operator


def _read_instead(user: Node, old: Node, new: Any) -> None:
    user.args = map_arg(user.args, lambda node: new if node is old else node)
    user.kwargs = map_arg(user.kwargs, lambda node: new if node is old else node)


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


class _PartsTracer(HybridTracer):
    """Follows composed modules; what their forward asks of a value, the example answers."""

    def __init__(self, model: nn.Module, given: tuple[Any, ...]) -> None:
        super().__init__()
        self._model, self._given = model, given
        self._paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}

    def path_of_module(self, mod: nn.Module) -> str:
        """Path in the whole model."""
        return self._paths[mod]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one node."""
        return not _has_parts(m) and super().is_leaf_module(m, module_qualified_name)

    def to_bool(self, obj: Proxy) -> bool:
        """The truth of the example's value."""
        return bool(self._value(obj.node))

    def _value(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self._given
        if node.op not in ("call_function", "call_method"):
            raise TraceError(f"{node.name} is asked for a value")
        args: Any = map_arg(node.args, self._value)
        kwargs: Any = map_arg(node.kwargs, self._value)
        target: Any = node.target
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)
