"""Tracing: layers are leaves, arithmetic modules are read as attributes, every node has a scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.ao.nn import quantized as torch_quantized
from torch.fx import Graph, Node, Tracer
from torch.fx.proxy import TraceError

from bevquant_hybrid._leaf import LEAF_MARK
from bevquant_hybrid.nn._arithmetic import Arithmetic
from bevquant_hybrid.nn.intrinsic import Fused
from bevquant_hybrid.nn.qat import has_qat_form
from bevquant_hybrid.nn.qat._weighted import Weighted

__all__ = ["HybridTracer", "is_leaf", "scope_of", "trace"]


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
        """Make a node that knows its scope."""
        node = super().create_node(*args, **kwargs)
        node.meta["scope"] = self.where[-1] if self.where else ""
        return node


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


def trace(model: nn.Module, caller: str) -> Graph:
    """Trace a model.

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
    return graph
