"""Functions that torch knows by name, so that tracing records the call and not what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_NAMESPACE = "bevquant_hybrid"
Function = TypeVar("Function", bound=Callable[..., Any])


def operator(schema: str) -> Callable[[Function], Function]:
    """Register a function as ``torch.ops.bevquant_hybrid.<its name>`` and return that operator.

    Args:
        schema: Arguments and result as torch's registry writes them.
    """

    def register(function: Function) -> Function:
        name = function.__name__.lstrip("_")
        made = torch.library.custom_op(
            f"{_NAMESPACE}::{name}", function, mutates_args=(), schema=schema
        )
        # The operator itself, not its wrapper: torch.jit.trace records calls of this one.
        found = getattr(getattr(torch.ops, _NAMESPACE), name).default
        found.__doc__ = made.__doc__ = function.__doc__
        return cast(Function, found)

    return register
