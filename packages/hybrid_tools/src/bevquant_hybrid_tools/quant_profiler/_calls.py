"""Leaf modules, and their calls in one run of a model."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import map_leaves, run_on
from bevquant_hybrid.nn.qat import OutputQuantized, Weighted
from bevquant_hybrid.nn.quantized import FixedPoint
from bevquant_hybrid.operators import Seen, Watch, tensors_in
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
    """List a model's operators by their first names, in the order of their definition.

    The second result has the further names of modules, with the first name of each.
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
    """One call of an operator."""

    path: str  # its name; empty for a function
    repeat: int  # number of earlier calls
    module: nn.Module | None  # the operator; None for a function
    function: Any = None  # the function; None for an operator
    method: str | None = None  # method of a FloatFunctional; None for others
    args: tuple[Any, ...] = ()  # positional arguments, as copies
    kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments
    output: Any = None  # its result, as a copy
    # The producer call of each input tensor, or None
    sources: list[int | None] = field(default_factory=list)
    # The consumer calls of its result, and `END` if the model returns it
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
        check_leaf_module: Whether a module is an operator; None for `is_operator`.
        watch: Called after each operator with its path, module, arguments and result.
    """
    recorder = _Recorder(keep, watch)
    operators, _ = named_operators(model, check_leaf_module or is_operator)
    try:
        for path, module in operators.items():
            recorder.attach(path, module)
        with undisturbed(model), recorder:
            recorder.end(run_on(model, positional(model, example_inputs), {}))
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


def on_device(model: nn.Module, inputs: Any, device: torch.device | str | None) -> tuple[Any, Any]:
    """A copy of a model on a device, and its inputs there; both as they are for None."""
    if device is None:
        return model, inputs

    def there(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    return copy.deepcopy(model).to(device), map_leaves(there, inputs)


def copied(value: Any) -> Any:
    """A value whose tensors no later operation changes."""

    def alone(leaf: Any) -> Any:
        if isinstance(leaf, QTensor):
            return leaf.like(payload(leaf).detach().clone())
        return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf

    return map_leaves(alone, value)


class _Recorder(Watch):
    """Lists calls with their producers and consumers."""

    def __init__(self, keep: bool, watch: Any) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._keep, self._watch = keep, watch
        self._counts: Counter[str] = Counter()

    def before(self, seen: Seen) -> None:
        given = (seen.args, seen.kwargs)
        about = seen.path, self._counts[seen.path], seen.module, seen.function, seen.method
        self._begun = Call(*about, *(copied(given) if self._keep else ()))
        self._begun.sources = self._sources(given)
        self._counts[seen.path] += seen.module is not None

    def after(self, seen: Seen, result: Any) -> Any:
        call = self._begun
        if seen.module is None and next(tensors_in(result), None) is None:
            return result
        if self._keep:
            call.output = copied(result)
        if self._watch is not None and seen.module is not None:
            self._watch(call.path, seen.module, seen.args, result)
        for source in dict.fromkeys(call.sources):
            if source is not None:
                self.calls[source].readers.append(len(self.calls))
        self.calls.append(call)
        for tensor in tensors_in(result):
            self.follow(tensor, len(self.calls) - 1)
        return result

    def _sources(self, given: Any) -> list[int | None]:
        return [self.makers.get(id(tensor)) for tensor in tensors_in(given)]

    def end(self, outputs: Any) -> None:
        for source in dict.fromkeys(self._sources(outputs)):
            if source is not None:
                self.calls[source].readers.append(END)
