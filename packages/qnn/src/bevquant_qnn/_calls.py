"""How the model calls its modules: what their own code alone does not tell.

A forward is traced with one value per parameter and optional parameters at their defaults. One
pass over example inputs shows which modules are called with other options, and which parameters
are lists of tensors, and of how many.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from bevquant_qnn._example import arguments, evaluation, run
from bevquant_qnn._sparse_tensor import is_sparse_tensor

__all__ = ["CallForm", "call_forms", "has_options"]


@dataclass
class CallForm:
    """How one module is called.

    Attributes:
        option: An optional parameter that gets another value than its default, if any does.
        tensors: The optional parameters that get a tensor, if these are the only ones that get
            another value than their default, and the same ones in every call.
        lengths: Parameters that get a list or tuple of tensors, with its length.
    """

    option: str | None = None
    tensors: frozenset[str] | None = None
    lengths: dict[str, int] = field(default_factory=dict)


def has_options(module: nn.Module) -> bool:
    """Tell whether the forward has optional parameters."""
    return bool(_defaults(module))


def call_forms(
    modules: Iterable[nn.Module], model: nn.Module, example_inputs: Any
) -> dict[nn.Module, CallForm]:
    """Run the model once, in evaluation mode, and return the form of each module's calls."""
    forms = {module: CallForm() for module in modules}
    args, kwargs = arguments(example_inputs)
    with ExitStack() as stack:
        stack.enter_context(evaluation(model))
        for module, form in forms.items():
            hook = module.register_forward_pre_hook(_watch(module, form), with_kwargs=True)
            stack.callback(hook.remove)
        run(model, args, kwargs)
    return forms


def _defaults(module: nn.Module) -> dict[str, Any]:
    """Optional parameters; those that gather further arguments (``**kwargs``) have none."""
    parameters = inspect.signature(module.forward).parameters
    gathering = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        name: () if parameter.kind in gathering else parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty or parameter.kind in gathering
    }


def _watch(module: nn.Module, form: CallForm) -> Callable[..., None]:
    signature, defaults = inspect.signature(module.forward), _defaults(module)
    lengths: dict[str, set[int]] = {}
    given: set[frozenset[str]] = set()

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = signature.bind(*args, **kwargs).arguments
        other = {n: v for n, v in bound.items() if n in defaults and v is not defaults[n]}
        given.add(frozenset(other))
        form.option = next(iter(other), form.option)
        tensors = all(isinstance(value, Tensor) for value in other.values())
        form.tensors = frozenset(other) if tensors and len(given) == 1 else None
        for name, value in bound.items():
            if name in defaults:
                continue
            lengths.setdefault(name, set()).add(len(value) if _is_tensors(value) else -1)
            (length, *others) = lengths[name]
            if others or length < 1:
                form.lengths.pop(name, None)
            else:
                form.lengths[name] = length

    return hook


def _is_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(item, Tensor) or is_sparse_tensor(item) for item in value
    )
