"""The symbolic value that flows through a forward while it is traced.

Plain ``torch.fx`` proxies lose things in silence that sparse code relies on: ``x.features = y``
sets a Python attribute on the proxy and nothing else, ``out += y`` becomes an out-of-place add,
``y = x.features`` is only read when ``y`` is used, and ``isinstance(x, torch.Tensor)`` is False.
Here each of these is recorded in the order in which it happens, or refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ._checks import (
    asks_for_class,
    calling_frame,
    check_not,
    reads_attribute,
    way_that_does_not_raise,
)
from ._errors import UntraceableError

if TYPE_CHECKING:
    from ._tracer import ForwardTracer

_OWN_FIELDS = frozenset({"tracer", "node"})
QUESTION = "bevquant_question"  # node.meta key of a read made by hasattr() or getattr()


class TracedValue(fx.Proxy):
    """A proxy that records attribute writes, in-place operators and reads in program order."""

    tracer: ForwardTracer

    def __setattr__(self, name: str, value: object) -> None:
        if name in _OWN_FIELDS:
            object.__setattr__(self, name, value)
        else:
            self.tracer.create_proxy("call_function", setattr, (self, name, value), {})

    def __delattr__(self, name: str) -> None:
        raise UntraceableError(f"deletes the attribute {name!r} of a traced value")

    def __getattr__(self, name: str) -> fx.Proxy:  # type: ignore[override]
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if self.tracer.kind_of(self.node) is torch.Tensor and not hasattr(torch.Tensor, name):
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        read = self.tracer.create_proxy("call_function", getattr, (self, name), {})
        if not reads_attribute(calling_frame()):
            read.node.meta[QUESTION] = True  # hasattr(x, name): left unused if so
        return read

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        node = self.node
        if node.op == "call_function" and node.target is getattr and len(node.args) == 2:
            base, name = node.args
            if isinstance(base, fx.Node) and isinstance(name, str):
                method = self.tracer.create_proxy(
                    "call_method", name, (self.tracer.proxy(base), *args), kwargs
                )
                if not node.users:
                    node.graph.erase_node(node)
                return method
        return super().__call__(*args, **kwargs)

    def __dir__(self) -> list[str]:
        # mmdet3d asks `"replace_feature" in out.__dir__()` to tell spconv 2 from spconv 1.
        return [*super().__dir__(), "replace_feature"]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __bool__(self) -> bool:
        # `assert x.ndim == 2` and `if x.ndim != 2: raise …` go on in one way only.
        goes_on = way_that_does_not_raise(calling_frame())
        if goes_on is None:
            return self.tracer.to_bool(self)
        check = torch._assert if goes_on else check_not
        arguments = (self, "a check of the forward failed")
        self.tracer.create_proxy("call_function", check, arguments, {})
        return goes_on

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # torch's C code asks too, and would take a class that is not ours at its word.
        if not asks_for_class(calling_frame()):
            return type(self)
        known = self.tracer.kind_of(self.node)
        if known is None:
            raise UntraceableError(
                f"asks for the class of the value `{self.node.name}`, which is not known while "
                "tracing"
            )
        return known


def _inplace(function: Callable[[Any, Any], Any]) -> Callable[[TracedValue, Any], fx.Proxy]:
    def record(self: TracedValue, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return record


INPLACE_OPERATORS: tuple[Callable[[Any, Any], Any], ...] = (
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.imatmul,
    operator.iand,
    operator.ior,
    operator.ixor,
    operator.ilshift,
    operator.irshift,
)
for _function in INPLACE_OPERATORS:
    setattr(TracedValue, f"__{_function.__name__}__", _inplace(_function))
