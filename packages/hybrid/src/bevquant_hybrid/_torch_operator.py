"""Functions registered with torch, so that tracing records the call and not its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_NAMESPACE = "bevquant_hybrid"
Function = TypeVar("Function", bound=Callable[..., Any])

# Spelled as in torch's schemas: torch's own inference turns integers into symbolic sizes.
_TYPES = {
    **{name: name for name in ("Tensor", "int", "float", "bool", "str")},
    **{f"Sequence[{name}]": f"{name}[]" for name in ("Tensor", "int", "float")},
    **{"tuple[Tensor, Tensor]": "(Tensor, Tensor)", "list[Tensor]": "Tensor[]"},
}


def operator(function: Function, name: str = "") -> Function:
    """Register a function as ``torch.ops.bevquant_hybrid.<its name>`` and return that operator.

    Args:
        function: Its postponed annotations are the schema.
        name: Default: the function's name without leading underscores.
    """
    kinds = {name: _schema_of(kind) for name, kind in function.__annotations__.items()}
    result = kinds.pop("return")
    schema = f"({', '.join(f'{kind} {argument}' for argument, kind in kinds.items())}) -> {result}"
    name = name or function.__name__.lstrip("_")
    made = torch.library.custom_op(
        f"{_NAMESPACE}::{name}", function, mutates_args=(), schema=schema
    )
    # The operator itself, not its wrapper: torch.jit.trace records calls of this one.
    found = getattr(getattr(torch.ops, _NAMESPACE), name).default
    found.__doc__ = made.__doc__ = function.__doc__
    return cast(Function, found)


def _schema_of(annotation: str) -> str:
    plain = annotation.removesuffix(" | None")
    return _TYPES[plain] + "?" * (plain != annotation)
