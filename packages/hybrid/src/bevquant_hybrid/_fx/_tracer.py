"""Tracing: layers are leaves, arithmetic modules are read as attributes, every node has a scope."""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn import quantized as torch_quantized
from torch.fx import Graph, Node, Proxy, Tracer
from torch.fx.proxy import TraceError

from bevquant_hybrid._leaf import LEAF_MARK
from bevquant_hybrid.nn._arithmetic import Arithmetic
from bevquant_hybrid.nn.intrinsic import Fused
from bevquant_hybrid.nn.qat import has_qat_form
from bevquant_hybrid.nn.qat._weighted import Weighted

__all__ = ["HybridTracer", "is_leaf", "line_of", "number_nodes", "scope_of", "trace"]

_LIBRARIES = tuple(f"{os.path.dirname(file)}{os.sep}" for file in (torch.__file__, __file__))


def _writing(function: Callable[..., Any]) -> Callable[[Proxy, Any], Proxy]:
    def call(self: Proxy, other: Any) -> Proxy:
        name = function.__name__.removeprefix("i")
        args = (self, other)
        found: Proxy = self.tracer.create_proxy("call_function", function, args, {}, name=name)
        return found

    return call


class _WritableProxy(Proxy):
    """A traced value that records ``x += y`` as what it is: other names show the result too."""

    __iadd__ = _writing(operator.iadd)
    __isub__ = _writing(operator.isub)
    __imul__ = _writing(operator.imul)
    __itruediv__ = _writing(operator.itruediv)
    __imatmul__ = _writing(operator.imatmul)


class HybridTracer(Tracer):
    """Tracer of float, fused and prepared models.

    Attributes:
        methods: Calls of wrapped methods, by the names that they are to have in the model. They
            are added when it is traced: a Sequential may be iterating over its modules before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.methods: dict[str, nn.Module] = {}
        self.where: list[str] = []

    def proxy(self, node: Node) -> Proxy:
        """What stands for a node's value in the forward."""
        return _WritableProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one node."""
        return is_leaf(m) or super().is_leaf_module(m, module_qualified_name)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Read an attribute of a module; arithmetic modules become get_attr nodes."""
        if isinstance(attr_val, torch_quantized.FloatFunctional | Arithmetic) or (
            isinstance(attr_val, Fused | Weighted) and attr_val.adds
        ):
            assert isinstance(attr_val, nn.Module)
            return self.create_proxy("get_attr", self.path_of_module(attr_val), (), {})
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Follow a module's call, noting where it stands."""
        self.where.append(self.path_of_module(m))
        result = super().call_module(m, forward, args, kwargs)
        self.where.pop()  # kept where tracing fails: the message names it
        return result

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        """Make a node that knows its scope, and the line of the forward that made it."""
        node = super().create_node(*args, **kwargs)
        node.meta["scope"] = self.where[-1] if self.where else ""
        node.meta["line"] = _line_outside()
        return node


def _line_outside() -> str:
    """File and line of the innermost caller that is neither torch's nor the tracer's."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is one node whatever it contains."""
    if getattr(module, LEAF_MARK, False) or isinstance(module, Fused) or has_qat_form(module):
        return True
    return type(module).__module__.startswith(
        ("bevquant_hybrid.nn.", "bevquant_hybrid._fake_quant")
    )


def scope_of(node: Node) -> str:
    """Path of the innermost module whose forward holds the node (of the leaf itself for a leaf)."""
    return str(node.meta.get("scope", ""))


def line_of(node: Node) -> str:
    """File and line of the forward that a node was traced from; ``""`` of one made later."""
    return str(node.meta.get("line", ""))


_NUMBER_METHODS = {"size", "dim", "numel", "nelement", "ndimension", "__len__", "stride", "item"}
_FACTS = {"shape", "ndim", "device", "dtype"}
_ARITHMETIC = {
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv),
    *(operator.mod, operator.neg, operator.getitem, operator.pow, int, float, len, max, min),
    *(function for function in vars(math).values() if callable(function)),
}


def number_nodes(graph: Graph) -> set[Node]:
    """Return the nodes that hold numbers, tuples of them, or facts about tensors."""
    found: set[Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        of_numbers = bool(inputs) and all(i in found for i in inputs)
        if (
            (node.op == "call_method" and node.target in _NUMBER_METHODS)
            or (node.op == "call_function" and node.target is getattr and node.args[1] in _FACTS)
            or (node.op == "call_function" and node.target in _ARITHMETIC and of_numbers)
            or (node.op == "call_function" and node.target is len)
        ):
            found.add(node)
    return found


_IN_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.imatmul: operator.matmul,
    **{f"__i{name}__": name for name in ("add", "sub", "mul", "matmul")},
    "__itruediv__": "div",
}
_VIEWS = {
    *(operator.getitem, torch.transpose, torch.permute, torch.flatten, torch.reshape),
    *(torch.squeeze, torch.unsqueeze, torch.chunk, torch.split, torch.unbind, torch.narrow),
    *("view", "reshape", "flatten", "transpose", "permute", "squeeze", "unsqueeze", "chunk"),
    *("split", "unbind", "narrow", "select", "expand", "view_as", "unflatten", "detach"),
}


def _without_writing(graph: Graph, model: nn.Module, caller: str) -> None:
    """Have every call that writes into its input make a new tensor, which later readers read.

    ``x += y``, ``x.mul_(2)`` and modules with ``inplace=True`` change what every name of that
    tensor shows. A traced name shows the value as it was: later readers get the result instead.

    Raises:
        ValueError: It writes through a view into what is read later.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    writing = [node for node in graph.nodes if _writes(node, model)]
    numbers = number_nodes(graph)
    for node in writing:
        written = node.args[0] if node.args else None
        if not isinstance(written, Node) or node in numbers:
            continue
        later = [user for user in written.users if order[user] > order[node]]
        seen_through = [
            user
            for view in written.users
            if order[view] < order[node] and view.target in _VIEWS
            for user in view.users
            if order[user] > order[node]
        ]
        base = written
        while base.target in _VIEWS and isinstance(base.args[0], Node):
            base = base.args[0]
            seen_through += [user for user in base.users if order[user] > order[node]]
        if seen_through:
            raise ValueError(
                f"{caller}: {line_of(node)}: {node.name} writes through a view into {base.name}, "
                f"which {seen_through[0].name} reads later ({line_of(seen_through[0])}); compute "
                "the new tensor with torch.cat or torch.where instead of writing into a part"
            )
        for user in later:
            user.replace_input_with(written, node)


def _writes(node: Node, model: nn.Module) -> bool:
    """Whether a call overwrites its first input; a function is replaced by one that does not."""
    target: Any = node.target
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(target), "inplace", False))
    if node.op in ("call_function", "call_method") and target in _IN_PLACE:
        node.target = _IN_PLACE[target]
        return True
    if node.op == "call_function":
        return bool(node.kwargs.get("inplace", False))
    method = node.op == "call_method" and target.endswith("_") and not target.endswith("__")
    if method and hasattr(Tensor, target[:-1]):
        node.target = target[:-1]
        return True
    return False


def trace(model: nn.Module, caller: str) -> Graph:
    """Trace a model; what it writes in place is written anew.

    Raises:
        ValueError: Its forward cannot be followed; the message names the module.
    """
    tracer = HybridTracer()
    try:
        graph = tracer.trace(model)
    # What Python and NumPy raise where a proxy is no value: of len(), of asarray(), of iteration.
    except (TraceError, TypeError, RuntimeError, ValueError, AttributeError) as error:
        where = tracer.where[-1] if tracer.where else ""
        inside = model.get_submodule(where)
        raise ValueError(
            f"{caller}: the forward of {where or 'the model'} ({type(inside).__name__}) cannot be "
            f"traced: {error}. Move what depends on data out of it, or make it one node with "
            "bevquant_hybrid.utils.fx_helper.wrap"
        ) from error
    for name, call in tracer.methods.items():
        model.add_module(name, call)
    _without_writing(graph, model, caller)
    return graph
