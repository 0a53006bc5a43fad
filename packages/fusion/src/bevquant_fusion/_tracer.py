"""Symbolic tracing that refuses to guess, on top of ``torch.fx``."""

from __future__ import annotations

import inspect
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from ._errors import UntraceableError
from ._proxy import TracedValue
from ._sparse_names import is_sparse_module, sparse_tensor_class

_FEATURE_ATTRIBUTES = frozenset({"features"})
_TENSOR_METHODS = frozenset(
    "dense relu relu_ view reshape permute transpose contiguous flatten squeeze unsqueeze float "
    "half to clone detach add add_ mul mul_ sum mean softmax sigmoid tanh expand repeat".split()
)
_ARITHMETIC = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.iadd, operator.imul}
)
_NOT_ONE_TENSOR = frozenset("split chunk unbind max min sort topk meshgrid size numel".split())


class ForwardTracer(fx.Tracer):
    """Traces one module's own forward; every child module it calls is a leaf.

    Args:
        strict: Whether the graph must be fit to replace the forward. Then reading ``training`` in
            a branch and tensors made from nothing are refused; otherwise they are specialised.
    """

    proxy_buffer_attributes = True

    def __init__(self, *, strict: bool = True) -> None:
        super().__init__()
        self.strict = strict
        self.modes: tuple[bool, ...] = ()

    def proxy(self, node: fx.Node) -> TracedValue:
        return TracedValue(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def run(self, module: nn.Module) -> fx.Graph:
        """Trace ``module`` without touching it.

        Raises:
            UntraceableError: With the class of the module and the reason.
        """
        name = type(module).__name__
        shadow = _Shadow.of(module, self)
        self._autowrap_function_ids |= {id(f) for f in _replace_feature_functions(type(module))}
        self.modes = _execution_modes()
        try:
            with warnings.catch_warnings(), _quiet_fx():
                warnings.simplefilter("ignore")
                graph = self.trace(shadow)
        except UntraceableError as error:
            raise UntraceableError(f"{name}.forward {error}") from None
        except Exception as error:
            reason = str(error).split("\n")[0] or type(error).__name__
            raise UntraceableError(f"{name}.forward cannot be traced: {reason}") from error
        _Shadow.check(shadow, module)
        try:
            self.drop_unused_reads(graph)
        except UntraceableError as error:
            raise UntraceableError(f"{name}.forward {error}") from None
        return graph

    def drop_unused_reads(self, graph: fx.Graph) -> None:
        """Erase reads that nothing uses, which are what ``hasattr`` leaves behind."""
        for node in reversed(list(graph.nodes)):
            if node.op == "get_attr" and not node.users:
                graph.erase_node(node)
            elif node.target is getattr and not node.users:
                base, attribute = node.args
                if (
                    self.strict
                    and attribute != "replace_feature"
                    and self.kind_of(base) is None
                    and not str(attribute).startswith("_")
                ):
                    raise UntraceableError(
                        f"tests for the attribute {attribute!r} of the value `{base}`, whose "
                        "class is not known while tracing"
                    )
                graph.erase_node(node)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """One placeholder per parameter without a default; the others keep their default."""
        args: list[Any] = [self.root]
        keywords: dict[str, Any] = {}
        for name, parameter in list(inspect.signature(root_fn).parameters.items())[1:]:
            if parameter.kind is parameter.VAR_POSITIONAL:
                raise UntraceableError(f"takes a variable number of inputs (*{name})")
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            if parameter.default is not parameter.empty:
                if parameter.kind is not parameter.KEYWORD_ONLY:
                    args.append(parameter.default)
                continue
            value = self.create_proxy("placeholder", name, (), {})
            if parameter.kind is parameter.KEYWORD_ONLY:
                keywords[name] = value
            else:
                args.append(value)
        if not keywords:
            return root_fn, args

        def with_keywords(*values: Any) -> Any:
            return root_fn(*values, **keywords)

        return with_keywords, args

    def create_arg(self, a: Any) -> Any:
        """Lower ``a`` into the graph; a tensor from nowhere is refused when strict."""
        if type(a) is TracedValue:
            return a.node
        if isinstance(a, torch.Tensor) and not isinstance(a, nn.Parameter):
            for name, buffer in self.root.named_buffers():
                if buffer is a:
                    return self.create_node("get_attr", name, (), {})
            if self.strict:
                raise UntraceableError("makes a tensor that is not computed from its inputs")
            return self.create_node("call_function", constant_tensor, (), {})
        return super().create_arg(a)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Record a node, unless it runs in a mode that a graph cannot reproduce."""
        if kind not in ("placeholder", "output"):
            if _execution_modes() != self.modes:
                raise UntraceableError(
                    "switches the gradient, inference or autocast mode, which a graph cannot hold"
                )
            frame = sys._getframe(1)
            while frame is not None and frame.f_code.co_name != "trace":
                if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                    raise UntraceableError("uses torch.utils.checkpoint")
                frame = frame.f_back  # type: ignore[assignment]
        return super().create_node(kind, target, *args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Refuse a branch on a traced value."""
        if obj.node.op == "get_attr" and obj.node.target == "training":
            raise UntraceableError("takes another path in training mode than in evaluation mode")
        raise UntraceableError(f"branches on the value `{obj.node.name}`")

    def iter(self, obj: fx.Proxy) -> Any:
        """Refuse a loop over a traced value."""
        raise UntraceableError(f"loops over the value `{obj.node.name}`, whose length is unknown")

    def read_training(self, actual: bool) -> Any:
        """What ``self.training`` answers: the live flag in a strict graph, else the present one."""
        return self.create_proxy("get_attr", "training", (), {}) if self.strict else actual

    def kind_of(self, node: fx.Node) -> type | None:
        """``torch.Tensor``, the sparse tensor class, or None where it cannot be known."""
        if "kind" in node.meta:
            return node.meta["kind"]  # type: ignore[no-any-return]
        sparse = sparse_tensor_class()
        if node.op == "get_attr":
            return torch.Tensor if node.target != "training" else bool
        if node.op == "call_module":
            child = self.root.get_submodule(str(node.target))
            if is_sparse_module(child):
                return sparse
            if type(child).__module__.startswith("torch.nn.modules.") and not isinstance(
                child, (nn.Sequential, nn.Identity, nn.LSTM, nn.GRU, nn.RNN, nn.MultiheadAttention)
            ):
                return None if getattr(child, "return_indices", False) else torch.Tensor
            return None
        if node.op == "call_method":
            if node.target == "replace_feature":
                return sparse
            return torch.Tensor if node.target in _TENSOR_METHODS else None
        if node.op == "call_function":
            if node.target is getattr:
                return torch.Tensor if node.args[1] in _FEATURE_ATTRIBUTES else None
            if getattr(node.target, "__name__", "") == "replace_feature":
                return sparse
            if node.target in _ARITHMETIC:
                first = node.args[0]
                return self.kind_of(first) if isinstance(first, fx.Node) else None
            module = getattr(node.target, "__module__", None) or ""
            name = getattr(node.target, "__name__", "")
            if module.split(".")[0] == "torch" or module == "_VariableFunctionsClass":
                return None if name in _NOT_ONE_TENSOR else torch.Tensor
        return None


@contextmanager
def _quiet_fx() -> Iterator[None]:
    """Keep fx's log lines about attempts that fail off stderr; the error says it all."""
    logger = logging.getLogger("torch.fx._symbolic_trace")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def constant_tensor() -> torch.Tensor:
    """Stand for a tensor that a forward made from nothing; such graphs are read, never run."""
    raise RuntimeError("a graph that was traced for reading only cannot be run")


def _execution_modes() -> tuple[bool, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


def _replace_feature_functions(cls: type) -> list[Callable[..., Any]]:
    """Module-level helpers called ``replace_feature`` that the class's code can see.

    They choose between spconv 1 and 2 by looking at the tensor; kept whole, the choice is made
    when the graph runs.
    """
    found = []
    for base in cls.__mro__:
        namespace = getattr(sys.modules.get(base.__module__), "__dict__", {})
        function = namespace.get("replace_feature")
        if inspect.isfunction(function):
            found.append(function)
    return found


class _Shadow:
    """A stand-in for a module that shares its children and refuses to be written to."""

    @staticmethod
    def of(module: nn.Module, tracer: ForwardTracer) -> nn.Module:
        cls = type(module)
        if "forward" in vars(module):
            raise UntraceableError(f"{cls.__name__}.forward was replaced on the instance")

        def training(self: nn.Module) -> Any:
            return tracer.read_training(bool(vars(self)["training"]))

        def refuse(self: nn.Module, name: str, value: object) -> None:
            raise UntraceableError(f"assigns self.{name}")

        shadow_class = type(
            cls.__name__,
            (cls,),
            {"training": property(training), "__setattr__": refuse, "__module__": cls.__module__},
        )
        shadow: nn.Module = object.__new__(shadow_class)
        for key, value in vars(module).items():
            private = not key.startswith("_") and type(value) in (list, dict, set)
            vars(shadow)[key] = value.copy() if private else value
        return shadow

    @staticmethod
    def check(shadow: nn.Module, module: nn.Module) -> None:
        for key, value in vars(module).items():
            if not key.startswith("_") and type(value) in (list, dict, set):
                if len(vars(shadow)[key]) != len(value):
                    raise UntraceableError(f"{type(module).__name__}.forward writes to self.{key}")
