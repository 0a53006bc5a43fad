"""Tracing: layers are leaves, arithmetic modules are read as attributes, every node has a scope."""

from __future__ import annotations

import inspect
import math
import operator
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn import quantized as torch_quantized
from torch.fx import Graph, Node, Proxy, Tracer
from torch.fx.node import map_arg
from torch.fx.proxy import TraceError

from bevquant_graph import op_spec
from bevquant_hybrid._leaf import LEAF_MARK
from bevquant_hybrid.nn._functions import Arithmetic
from bevquant_hybrid.nn.intrinsic import Fused
from bevquant_hybrid.nn.qat import has_qat_form
from bevquant_hybrid.nn.qat._weighted import Weighted

_LIBRARIES = tuple(f"{os.path.dirname(file)}{os.sep}" for file in (torch.__file__, __file__))


def _writing(function: Callable[..., Any]) -> Callable[[Proxy, Any], Proxy]:
    def call(self: Proxy, other: Any) -> Proxy:
        name = function.__name__.removeprefix("i")
        args = (self, other)
        found: Proxy = self.tracer.create_proxy("call_function", function, args, {}, name=name)
        return found

    return call


def with_items(
    mapping: Mapping[str, Any], items: Mapping[str, Any], taken: Collection[str] = ()
) -> dict[str, Any]:
    """Return a copy of a forward's input dictionary with its insertions and removals."""
    return {**{name: mapping[name] for name in mapping if name not in taken}, **items}


class _WritableProxy(Proxy):
    """A traced value that records ``x += y`` as in-place: all names of the value see the result.

    An item written to an input dictionary (``batch["maps"] = x``) can be read back. Consumers of
    the dictionary get a copy with the changes applied.
    """

    def __init__(self, node: Node, tracer: Tracer) -> None:
        super().__init__(node, tracer)
        self.written: dict[str, Any] = {}
        self.taken: set[str] = set()

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str):
            raise TypeError(
                f"it writes into a part of {self.node.name}; compute the new tensor with torch.cat "
                "or torch.where instead"
            )
        self.written[key] = value

    def __getitem__(self, key: Any) -> Any:
        return self._read("call_function", operator.getitem, key)

    def __delitem__(self, key: str) -> None:
        self.written.pop(key, None)
        self.taken.add(key)

    def __contains__(self, key: Any) -> bool:
        if key in self.written:
            return True
        if key in self.taken:
            return False
        raise TypeError(
            f"it asks whether {key!r} is in {self.node.name}, which a trace cannot know of what it "
            "is given; settle that before the model is made"
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("update", "get", "pop"):
            return getattr(self, f"_{name}")
        if name in ("setdefault", "popitem", "clear"):
            raise TypeError(f"it calls {name}() of {self.node.name}; write and read single names")
        if inspect.isgetsetdescriptor(getattr(Tensor, name, None)) and op_spec(name).alias:
            return self._read("call_function", getattr, name)  # a value that may be written to
        return super().__getattr__(name)

    def _read(self, op: str, target: Any, key: Any, *default: Any) -> Any:
        if isinstance(key, str) and key in self.written:
            return self.written[key]
        if isinstance(key, str) and key in self.taken:
            if default:
                return default[0]
            raise TypeError(f"it reads {key!r} of {self.node.name}, which it took out before")
        return self.tracer.create_proxy(op, target, (self, key, *default), {})

    def _update(self, items: Any = (), **more: Any) -> None:
        self.written.update(items, **more)

    def _get(self, key: Any, default: Any = None) -> Any:
        return self._read("call_method", "get", key, default)

    def _pop(self, *args: Any) -> Any:
        if not args or not isinstance(args[0], str):  # of a list
            return self.tracer.create_proxy("call_method", "pop", (self, *args), {})
        found = self._get(*args) if len(args) > 1 else self[args[0]]
        del self[args[0]]
        return found

    __iadd__ = _writing(operator.iadd)
    __isub__ = _writing(operator.isub)
    __imul__ = _writing(operator.imul)
    __itruediv__ = _writing(operator.itruediv)
    __imatmul__ = _writing(operator.imatmul)


class HybridTracer(Tracer):
    """Tracer of float, fused and prepared models.

    Args:
        opened: Which modules are followed, although others of their class are one node.
        paths: Path of each module, where the traced module is not the model.
        example: The traced module's only input; it answers what a forward asks of a value.

    Attributes:
        methods: Calls of wrapped methods, by the names that they are to have in the model. They
            are added when it is traced: a Sequential may be iterating over its modules before.
    """

    def __init__(
        self,
        opened: Callable[[nn.Module], bool] = lambda module: False,
        paths: Mapping[nn.Module, str] | None = None,
        example: tuple[Any, ...] | None = None,
    ) -> None:
        super().__init__()
        self.methods: dict[str, nn.Module] = {}
        self.where: list[str] = []
        self._opened, self._paths, self._example = opened, paths, example

    def create_arg(self, a: Any) -> Any:
        """What a node reads: of a dictionary that the forward changed, the changed one."""
        if isinstance(a, _WritableProxy) and (a.written or a.taken):
            # What makes the proxy reads `a` again: without the changes it is the input itself.
            written, a.written, taken, a.taken = a.written, {}, a.taken, set()
            args = (a, written, tuple(sorted(taken))) if taken else (a, written)
            whole = self.create_proxy("call_function", with_items, args, {})
            a.written, a.taken = written, taken
            return whole.node
        return super().create_arg(a)

    def proxy(self, node: Node) -> Proxy:
        """What stands for a node's value in the forward."""
        return _WritableProxy(node, self)

    def iter(self, obj: Proxy) -> Iterator[Any]:
        """Refuse a loop over a value."""
        raise TraceError(
            f"it iterates over {obj.node.name}, and a traced value has no length; take its parts "
            "by index or by unpacking (a, b = x), and give arguments one by one instead of by *"
        )

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one node."""
        if "forward" in m.__dict__ and not getattr(m, LEAF_MARK, False):
            return False  # put on this one module: it does not do what its class does
        if self._opened(m):
            return False
        return is_leaf(m) or super().is_leaf_module(m, module_qualified_name)

    def path_of_module(self, mod: nn.Module) -> str:
        """Path in the model."""
        return super().path_of_module(mod) if self._paths is None else self._paths[mod]

    def to_bool(self, obj: Proxy) -> bool:
        """The truth of the example's value; without an example no value has one."""
        return super().to_bool(obj) if self._example is None else bool(self._value(obj.node))

    def _value(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self._example
        if node.op not in ("call_function", "call_method"):
            raise TraceError(f"{node.name} is asked for a value")
        args: Any = map_arg(node.args, self._value)
        kwargs: Any = map_arg(node.kwargs, self._value)
        target: Any = node.target
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)

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
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _line_of_error(traceback: TracebackType | None) -> str:
    """`` at FILE:LINE`` of the innermost frame that is neither torch's nor the tracer's."""
    found = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(_LIBRARIES):
            found = f" at {file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is one node whatever it contains."""
    if getattr(module, LEAF_MARK, False) or isinstance(module, Fused) or has_qat_form(module):
        return True
    return type(module).__module__.startswith(
        ("bevquant_hybrid.nn.", "bevquant_hybrid._fake_quant")
    )


def called_path(node: Node) -> str:
    """The module that a node calls, or the attribute whose method it calls; ``""``: neither."""
    if node.op == "call_module":
        return str(node.target)
    owner = node.args[0] if node.op == "call_method" and node.args else None
    return str(owner.target) if isinstance(owner, Node) and owner.op == "get_attr" else ""


def called_function(node: Node) -> Any:
    """The function that a node calls; of a tensor's method, the one of `Tensor`."""
    target: Any = node.target
    return getattr(Tensor, target, None) if node.op == "call_method" else target


def scope_of(node: Node) -> str:
    """Path of the innermost module whose forward holds the node (of the leaf itself for a leaf)."""
    return str(node.meta.get("scope", ""))


def line_of(node: Node) -> str:
    """File and line of the forward that a node was traced from; ``""`` of one made later."""
    return str(node.meta.get("line", ""))


_FACTS = {"shape", "ndim", "device", "dtype"}
_ARITHMETIC = {
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv),
    *(operator.mod, operator.neg, operator.getitem, operator.pow, int, float, len, max, min),
    *(function for function in vars(math).values() if callable(function)),
}


def _is_number(method: str) -> bool:
    return op_spec(method).kind == "size" or method in ("__len__", "item")


def number_nodes(graph: Graph) -> set[Node]:
    """Return the nodes that hold numbers, tuples of them, or facts about tensors."""
    found: set[Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        of_numbers = bool(inputs) and all(i in found for i in inputs)
        if (
            (node.op == "call_method" and _is_number(str(node.target)))
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


def _without_writing(graph: Graph, model: nn.Module, caller: str) -> None:
    """Replace in-place calls by calls with a new result, which later consumers use."""
    # `x += y`, `x.mul_(2)` and modules with `inplace=True` change all aliases of the tensor, while
    # traced names keep the old value: later consumers are redirected to the result.
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
            if order[view] < order[node] and _is_view(view, model)
            # The write is seen in the view's memory by whatever reads the view later.
            for user in view.users
            if order[user] > order[node]
        ]
        base = written
        while _is_view(base, model) and isinstance(base.args[0], Node):
            # And, the other way round, in all that this one is a view of.
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


def _is_view(node: Node, model: nn.Module) -> bool:
    """Whether a call's result is part of its first input's memory."""
    target: Any = node.target
    if node.op == "call_module":
        return op_spec(model.get_submodule(target)).alias
    called = node.op in ("call_function", "call_method")
    return called and op_spec(str(node.args[1]) if target is getattr else target).alias


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


@contextmanager
def _own_forward(model: nn.Module, caller: str) -> Iterator[None]:
    """Have a forward that was put on the model itself found where a tracer looks: in its class."""
    # Not put back: the graph module that is made of the model has the traced forward.
    own = model.__dict__.pop("forward", None)
    if own is None:
        yield
        return
    if not isinstance(own, MethodType) or own.__self__ is not model:
        raise ValueError(
            f"{caller}: the model's forward was replaced by {own!r}, which is no method of it; "
            "give types.MethodType(function, model), or a class with that forward"
        )
    cls = type(model)
    # `Tracer.trace` reads the forward of the class, which no attribute of the object changes.
    model.__class__ = type(cls.__name__, (cls,), {"forward": own.__func__})
    try:
        yield
    finally:
        model.__class__ = cls


def trace(model: nn.Module, caller: str) -> Graph:
    """Trace a model; in-place writes become new values."""
    tracer = HybridTracer()
    try:
        with _own_forward(model, caller):
            graph = tracer.trace(model)
    # What Python and NumPy raise where a proxy is no value: of len(), of asarray(), of iteration.
    except (TraceError, TypeError, RuntimeError, ValueError, AttributeError) as error:
        where = tracer.where[-1] if tracer.where else ""
        inside = model.get_submodule(where)
        raise ValueError(
            f"{caller}: the forward of {where or 'the model'} ({type(inside).__name__}) cannot be "
            f"traced{_line_of_error(error.__traceback__)}: {error}. Move what depends on data out "
            "of it, or make it one node with bevquant_hybrid.utils.fx_helper.wrap"
        ) from error
    for name, call in tracer.methods.items():
        model.add_module(name, call)
    _without_writing(graph, model, caller)
    return graph
