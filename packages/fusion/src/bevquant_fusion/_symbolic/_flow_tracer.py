"""Trace a whole region of a model into one graph, entering every module that can be entered."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from bevquant_sparse import is_sparse_conv

from ._chains import chain_members, is_chain
from ._kinds import KIND
from ._sparse_names import is_sparse_module, is_sparse_sequential
from ._tracer import ForwardTracer, Inputs, reason_of

SCOPE = "bevquant_scope"


class FlowTracer(ForwardTracer):
    """Inlines child modules; one that cannot be followed becomes a leaf, with the reason.

    Attributes:
        opaque: Path in the region to the reason why the module was not entered.
        entered: Paths in the region of the modules whose forward was followed.
        optioned: Paths in the region of those called with other than the default of a parameter.
    """

    strict = False

    def __init__(self, inputs: Inputs | None = None) -> None:
        super().__init__()
        self.opaque: dict[str, str] = {}
        self.entered: set[str] = set()
        self.optioned: set[str] = set()
        self._inputs = inputs
        self._path = ""

    def unknown_inputs(self, module: nn.Module) -> Inputs:
        """Placeholders shaped like the example inputs, where there are any."""
        if self._inputs is not None:
            args, kwargs = self._inputs
            return tuple(self._lift(a) for a in args), {k: self._lift(v) for k, v in kwargs.items()}
        if is_chain(module):
            return (self.create_proxy("placeholder", "input", (), {}),), {}
        return super().unknown_inputs(module)

    def _lift(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) or hasattr(value, "features"):
            proxy = self.create_proxy("placeholder", "input", (), {})
            proxy.node.meta[KIND] = torch.Tensor if isinstance(value, torch.Tensor) else type(value)
            return proxy
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)([self._lift(v) for v in value])
        if isinstance(value, dict):
            return {k: self._lift(v) for k, v in value.items()}
        return value

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Enter ``m`` where it is made of other modules, else record one call."""
        path = self.path_of_module(m)
        if is_leaf(m):
            return self.create_proxy("call_module", path, args, kwargs)
        mark = next(iter(reversed(self.graph.nodes)), None)
        outer, entered, opaque = self._path, set(self.entered), dict(self.opaque)
        self._path = path
        try:
            if m._forward_pre_hooks:
                args, kwargs = self._barrier(args), self._barrier(kwargs)
            result = self.enter(m, args, kwargs)
            if m._forward_hooks:
                self._barrier((args, kwargs))  # these hooks see what went in as well
                result = self._barrier(result)
            self.entered.add(path)
            if _uses_options(m, args, kwargs):
                self.optioned.add(path)
            return result
        except Exception as error:
            self._forget_after(mark)
            self.entered, self.opaque = entered, opaque
            self.opaque[path] = reason_of(m, error)
        finally:
            self._path = outer
        return self.create_proxy("call_module", path, args, kwargs)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of ``module``, or its members where it is a chain."""
        if is_chain(module):
            return self._run_chain(module, *args, **kwargs)
        return super().enter(module, args, kwargs)

    def _run_chain(self, chain: nn.Module, x: Any) -> Any:
        sparse = is_sparse_sequential(chain)
        for _, member in chain_members(chain):
            on_features = sparse and not (
                is_sparse_module(member)
                or is_sparse_conv(member)
                or (isinstance(x, fx.Proxy) and self.kind_of(x.node) is torch.Tensor)
            )
            x = x.replace_feature(member(x.features)) if on_features else member(x)
        return x

    def _barrier(self, values: Any) -> Any:
        """Hooks see, and may replace, what passes: a new value whose producer is the hook."""
        if isinstance(values, fx.Proxy):
            proxy = self.create_proxy("call_function", hook, (values,), {})
            proxy.node.meta[KIND] = self.kind_of(values.node)
            return proxy
        if isinstance(values, dict):
            return {k: self._barrier(v) for k, v in values.items()}
        if isinstance(values, list | tuple) and not hasattr(values, "_fields"):
            return type(values)(self._barrier(v) for v in values)
        return values

    def _forget_after(self, mark: fx.Node | None) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node is mark:
                return
            self.graph.erase_node(node)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Parameters become nodes; not cached, since a cached node may be forgotten again."""
        return super().getattr(attr, attr_val, {})

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Record a node with the module whose own forward makes it."""
        node = super().create_node(kind, target, *args, **kwargs)
        node.meta[SCOPE] = self._path
        return node


def is_leaf(module: nn.Module) -> bool:
    """Whether a call of ``module`` is one step: torch's own layers, sparse convs and their kin."""
    if is_sparse_conv(module) or isinstance(
        module, (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.Linear)
    ):
        return True
    if is_chain(module) or "forward" in vars(module):
        return False
    owner = next(c for c in type(module).__mro__ if "forward" in vars(c))
    return owner.__module__.split(".")[0] in ("torch", "spconv") or not hasattr(
        vars(owner)["forward"], "__code__"
    )


def _uses_options(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    signature = inspect.signature(type(module).forward)
    given = signature.bind(module, *args, **kwargs).arguments
    return any(
        parameter.default is not parameter.empty
        and name in given
        and given[name] is not parameter.default
        for name, parameter in signature.parameters.items()
    )


def hook(value: Any) -> Any:
    """Stands in a flow graph for the forward hooks of a module; such graphs are never run."""
    raise RuntimeError("a graph that was traced for reading only cannot be run")
