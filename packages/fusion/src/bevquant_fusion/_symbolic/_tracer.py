"""Symbolic tracing that refuses to guess, on top of ``torch.fx``."""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from ._errors import UntraceableError
from ._kinds import kind_of
from ._proxy import QUESTION, TracedValue
from ._shadow import shadow_of

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class ForwardTracer(fx.Tracer):
    """Traces one module's own forward; every child module it calls is a leaf."""

    proxy_buffer_attributes = True
    # Whether the graph must be fit to replace the forward. If not, ``training`` is read as it is
    # now, and tensors made from nothing are allowed.
    strict = True

    def __init__(self) -> None:
        super().__init__()
        self._modes: tuple[bool, ...] = ()

    def run(self, module: nn.Module) -> fx.Graph:
        """Trace ``module`` without touching it.

        Raises:
            UntraceableError: With the class of the module and the reason.
        """
        self._autowrap_function_ids |= {id(f) for f in _replace_feature_helpers(module)}
        self._modes = _execution_modes()
        try:
            with warnings.catch_warnings(), _quiet_fx():
                warnings.simplefilter("ignore")
                graph = self.trace(module)
            self._drop_unused_reads(graph)
        except Exception as error:
            raise UntraceableError(reason_of(module, error)) from error
        return graph

    def proxy(self, node: fx.Node) -> TracedValue:
        """Wrap ``node`` in the proxy that loses nothing."""
        return TracedValue(node, self)

    def kind_of(self, node: fx.Node) -> type | None:
        """The class of the value of ``node``, where it is known."""
        return kind_of(node, self.root)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Every module is one node."""
        return True

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of ``module`` on traced values."""
        shadow, check = shadow_of(module, self._read_training)
        result = type(module).forward(shadow, *args, **kwargs)
        check()
        return result

    def unknown_inputs(self, module: nn.Module) -> Inputs:
        """One placeholder per parameter without a default; the others keep their default."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, parameter in list(inspect.signature(type(module).forward).parameters.items())[1:]:
            if parameter.kind is parameter.VAR_POSITIONAL:
                raise UntraceableError(f"takes a variable number of inputs (*{name})")
            if parameter.kind is parameter.VAR_KEYWORD or parameter.default is not parameter.empty:
                continue
            value = self.create_proxy("placeholder", name, (), {})
            if parameter.kind is parameter.KEYWORD_ONLY:
                kwargs[name] = value
            else:
                args.append(value)
        return tuple(args), kwargs

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Called by fx for the inputs: they are made here, so that defaults are honoured."""
        args, kwargs = self.unknown_inputs(self.root)
        return (lambda: self.enter(self.root, args, kwargs)), []

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

    def get_fresh_qualname(self, prefix: str) -> str:
        """Called by fx to store a constant on the module, which is not ours to change."""
        raise UntraceableError(f"uses a constant object ({prefix.strip('_')})")

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Record a node, unless it runs in a mode that a graph cannot reproduce."""
        if kind not in ("placeholder", "output"):
            _refuse_checkpoint(sys._getframe(1))
            if self.strict and _execution_modes() != self._modes:
                raise UntraceableError(
                    "switches the gradient, inference or autocast mode, which a graph cannot hold"
                )
        return super().create_node(kind, target, *args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Refuse a branch on a traced value."""
        if obj.node.op == "get_attr" and obj.node.target == "training":
            raise UntraceableError("takes another path in training mode than in evaluation mode")
        raise UntraceableError(f"branches on the value `{obj.node.name}`")

    def iter(self, obj: fx.Proxy) -> Any:
        """Refuse a loop over a traced value."""
        raise UntraceableError(f"loops over the value `{obj.node.name}`, whose length is unknown")

    def _read_training(self, actual: bool) -> Any:
        return self.create_proxy("get_attr", "training", (), {}) if self.strict else actual

    def _drop_unused_reads(self, graph: fx.Graph) -> None:
        """Erase reads that nothing uses, which are what ``hasattr`` leaves behind."""
        for node in reversed(list(graph.nodes)):
            if node.users or (node.op != "get_attr" and node.target is not getattr):
                continue
            if node.op == "call_function":
                base, attribute = node.args
                question = QUESTION in node.meta and attribute != "replace_feature"
                if self.strict and question and self.kind_of(base) is None:
                    raise UntraceableError(
                        f"tests for the attribute {attribute!r} of the value `{base}`, whose "
                        "class is not known while tracing"
                    )
            graph.erase_node(node)


def reason_of(module: nn.Module, error: Exception) -> str:
    """One line: which forward could not be followed, and why."""
    name = type(module).__name__
    if isinstance(error, UntraceableError):
        return f"{name}.forward {error}"
    text = str(error).split("\n")[0] or type(error).__name__
    return f"{name}.forward cannot be traced: {text}"


def constant_tensor() -> torch.Tensor:
    """Stand for a tensor that a forward made from nothing; such graphs are read, never run."""
    raise RuntimeError("a graph that was traced for reading only cannot be run")


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


def _execution_modes() -> tuple[bool, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


def _refuse_checkpoint(frame: Any) -> None:
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise UntraceableError("uses torch.utils.checkpoint")
        frame = frame.f_back


def _replace_feature_helpers(root: nn.Module) -> list[Any]:
    """Module-level helpers called ``replace_feature`` that the code of ``root`` can see.

    They choose between spconv 1 and 2 by looking at the tensor; kept whole, the choice is made
    when the graph runs.
    """
    sources = {base.__module__ for m in root.modules() for base in type(m).__mro__}
    found = [getattr(sys.modules.get(name), "replace_feature", None) for name in sources]
    return [function for function in found if inspect.isfunction(function)]
