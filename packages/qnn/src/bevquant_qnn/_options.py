"""Which modules are called with arguments that a rebuilt forward could not take.

A forward is traced with every optional parameter at its default, and the rebuilt forward refuses
other values. Whether the model passes others shows when it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from bevquant_qnn._example import arguments, evaluation

__all__ = ["options_used"]


def options_used(modules: list[nn.Module], model: nn.Module, example_inputs: Any) -> dict[Any, str]:
    """Return, for modules called with an optional argument, that argument's name.

    The model runs once, in evaluation mode; not at all where no forward has optional parameters.
    """
    optional = [module for module in modules if _optional(module)]
    if not optional:
        return {}
    used: dict[Any, str] = {}
    args, kwargs = arguments(example_inputs)
    with ExitStack() as stack:
        stack.enter_context(evaluation(model))
        for module in optional:
            hook = module.register_forward_pre_hook(_watch(module, used), with_kwargs=True)
            stack.callback(hook.remove)
        model(*args, **kwargs)
    return used


def _optional(module: nn.Module) -> dict[str, Any]:
    parameters = inspect.signature(module.forward).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty
    }


def _watch(module: nn.Module, used: dict[Any, str]) -> Callable[..., None]:
    signature, defaults = inspect.signature(module.forward), _optional(module)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name in defaults and value is not defaults[name]:
                used[module] = name

    return hook
