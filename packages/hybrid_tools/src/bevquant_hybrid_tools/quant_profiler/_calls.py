"""Leaf modules, and the calls of them that one run of a model makes."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn import quantized as torch_quantized
from torch.overrides import TorchFunctionMode

from bevquant_graph import map_leaves
from bevquant_hybrid.nn.qat import OutputQuantized, Weighted
from bevquant_hybrid.nn.quantized import FLOAT_OPERATIONS, Arithmetic, FixedPoint
from bevquant_hybrid.operators import tensors_in
from bevquant_hybrid.qtensor import QTensor, payload
from bevquant_hybrid.undisturbed import positional, undisturbed
from bevquant_hybrid.utils.fx_helper import is_leaf
from bevquant_hybrid_tools.quant_profiler._tables import simple_table

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_PARTS = (Weighted, OutputQuantized, FixedPoint)

END = -1  # who reads a result of the model


def is_operator(module: nn.Module) -> bool:
    """Whether a module counts as one operator: this package's, torch's, and those without parts.

    A module of this package that computes in several quantized steps counts as those.
    """
    if any(isinstance(child, _PARTS) for child in module._modules.values()):
        return False
    if is_leaf(module) or not any(child is not None for child in module._modules.values()):
        return True
    of_torch = type(module).__module__.startswith(("torch.nn.modules.", "torch.ao.nn."))
    return of_torch and not isinstance(module, _CONTAINERS)


def named_operators(
    model: nn.Module, check: Callable[[nn.Module], bool] | None = None
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """List a model's operators by their first names.

    Args:
        model: Any model.
        check: What counts as an operator; None for `is_operator`.

    Returns:
        Modules by name, in the order of their definition; and further names of modules, with the
        first name of each.
    """
    check = check or is_operator
    found: dict[str, nn.Module] = {}
    first: dict[int, str] = {}
    again: dict[str, str] = {}

    def walk(module: nn.Module, path: str) -> None:
        if id(module) in first:
            again[path] = first[id(module)]
            return
        first[id(module)] = path
        if check(module):
            found[path] = module
            return
        for name, child in module._modules.items():
            if child is not None:
                walk(child, f"{path}.{name}" if path else name)

    walk(model, "")
    return found, again


@dataclass(eq=False)
class Call:
    """One call of an operator.

    Attributes:
        path: Its name; empty for a function.
        repeat: How often it had been called before.
        module: The operator; None for a function.
        function: The function; None for an operator.
        method: Which method of a FloatFunctional; None for others.
        args: What it was given, as copies.
        kwargs: By name.
        output: What it returned, as a copy.
        sources: For each tensor that it was given, which call made it; None for none.
        readers: Which calls read its result, and `END` where the model returns it.
    """

    path: str
    repeat: int
    module: nn.Module | None
    function: Any = None
    method: str | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    sources: list[int | None] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)

    @property
    def operator(self) -> nn.Module:
        """The module, where it is known to be one."""
        assert self.module is not None
        return self.module


def record_calls(
    model: nn.Module,
    example_inputs: Any,
    *,
    keep: bool = True,
    check_leaf_module: Callable[[nn.Module], bool] | None = None,
    watch: Callable[[str, nn.Module, tuple[Any, ...], Any], None] | None = None,
) -> list[Call]:
    """Run a model in evaluation mode, without observing, and list the calls in their order.

    Args:
        model: Float, calibration, QAT or converted model, traced or not.
        example_inputs: A tensor, or a tuple or list of the forward's arguments.
        keep: Copy inputs and outputs.
        check_leaf_module: What counts as an operator; None for `is_operator`.
        watch: Called after each operator with its path, module, arguments and result.
    """
    recorder = _Recorder(keep, watch)
    operators, _ = named_operators(model, check_leaf_module or is_operator)
    try:
        for path, module in operators.items():
            recorder.attach(path, module)
        with undisturbed(model), recorder:
            recorder.end(model(*positional(example_inputs)))
    finally:
        recorder.detach()
    return recorder.calls


def get_module_called_count(
    model: nn.Module,
    example_inputs: Any,
    check_leaf_module: Callable[[nn.Module], bool] | None = None,
    print_tabulate: bool = True,
) -> dict[str, int]:
    """Count the calls of each operator in one run: 0 for unused ones, above 1 for shared ones.

    Args:
        model: Float, calibration, QAT or converted model.
        example_inputs: A tensor, or a tuple or list of the forward's arguments.
        check_leaf_module: Whether a module is one operator; None for this package's modules,
            torch's, and those that hold no others.
        print_tabulate: Print the table.

    Returns:
        Calls by name, in the order of the modules' definition.

    Warns:
        UserWarning: A module has several names; its calls are counted under the first.

    Example:
        >>> _ = get_module_called_count(nn.Sequential(nn.ReLU(), nn.ReLU()), __import__("torch").ones(1))
        name      called times
        ------  --------------
        0                    1
        1                    1
    """  # noqa: E501
    operators, again = named_operators(model, check_leaf_module)
    for name, first in again.items():
        warnings.warn(
            f"get_module_called_count: {name} is the same module as {first}; its calls are "
            f"counted as those of {first}",
            UserWarning,
            stacklevel=2,
        )
    counts = dict.fromkeys(operators, 0)
    for call in record_calls(
        model, example_inputs, keep=False, check_leaf_module=check_leaf_module
    ):
        if call.module is not None:
            counts[call.path] += 1
    if print_tabulate:
        print(simple_table(["name", "called times"], [[n, c] for n, c in counts.items()]))
    return counts


def moved(value: Any, device: torch.device) -> Any:
    """Tensors on a device, whatever holds them."""
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def copied(value: Any) -> Any:
    """A value whose tensors no later operation changes."""

    def alone(leaf: Any) -> Any:
        if isinstance(leaf, QTensor):
            return leaf.like(payload(leaf).detach().clone())
        return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf

    return map_leaves(alone, value)


class _Recorder(TorchFunctionMode):
    """Operators by hooks, FloatFunctionals by their methods, functions by torch's dispatch."""

    def __init__(self, keep: bool, watch: Any) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._keep, self._watch = keep, watch
        self._depth = 0  # operators that are running
        self._begun: list[Call | None] = []
        self._counts: Counter[str] = Counter()
        self._makers: dict[int, int] = {}
        self._alive: list[Any] = []  # else a new tensor could get a dead one's identity
        self._handles: list[Any] = []
        self._wrapped: list[tuple[nn.Module, str]] = []

    def attach(self, path: str, module: nn.Module) -> None:
        if isinstance(module, torch_quantized.FloatFunctional | Arithmetic):
            self._attach_methods(path, module)
            return

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._begin(path, module, None, args, kwargs)

        def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            self._finish(args, result)

        self._handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def _attach_methods(self, path: str, module: nn.Module) -> None:
        """Stand in front of a FloatFunctional's methods: no hook tells of their calls."""
        for name in FLOAT_OPERATIONS:
            if not hasattr(type(module), name):
                continue

            def call(*args: Any, _name: str = name, **kwargs: Any) -> Any:
                self._begin(path, module, _name, args, kwargs)
                result = getattr(type(module), _name)(module, *args, **kwargs)
                self._finish(args, result)
                return result

            setattr(module, name, call)
            self._wrapped.append((module, name))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module, name in self._wrapped:
            delattr(module, name)

    def _begin(self, path: str, module: nn.Module, method: str | None, args: Any, kw: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            self._begun.append(None)
            return
        sources = self._sources((args, kw))
        call = Call(path, self._counts[path], module, method=method, sources=sources)
        self._counts[path] += 1
        if self._keep:
            call.args, call.kwargs = copied(args), copied(kw)
        self._begun.append(call)

    def _finish(self, args: Any, result: Any) -> None:
        call = self._begun.pop()
        if call is not None:
            if self._keep:
                call.output = copied(result)
            if self._watch is not None:
                self._watch(call.path, call.operator, args, result)
            self._add(call, result)
        self._depth -= 1

    def _sources(self, given: Any) -> list[int | None]:
        return [self._makers.get(id(tensor)) for tensor in tensors_in(given)]

    def _add(self, call: Call, result: Any) -> None:
        for source in dict.fromkeys(call.sources):
            if source is not None:
                self.calls[source].readers.append(len(self.calls))
        self.calls.append(call)
        for tensor in tensors_in(result):
            self._alive.append(tensor)
            self._makers[id(tensor)] = len(self.calls) - 1

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        sources = [] if self._depth else self._sources(given)
        if all(source is None for source in sources):
            return func(*args, **given[1])
        if self._keep:
            given = copied(given)
        result = func(*args, **(kwargs or {}))
        if next(tensors_in(result), None) is not None:
            call = Call("", 0, None, func, None, *given, sources=sources)
            if self._keep:
                call.output = copied(result)
            self._add(call, result)
        return result

    def end(self, outputs: Any) -> None:
        for source in dict.fromkeys(self._sources(outputs)):
            if source is not None:
                self.calls[source].readers.append(END)
