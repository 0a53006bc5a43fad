"""Functions that torch knows by name, so that tracing records the call and not what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_NAMESPACE = "bevquant_hybrid"
Function = TypeVar("Function", bound=Callable[..., Any])

# As torch's registry writes them; its own reading of annotations makes symbolic sizes of integers.
_TYPES = {
    **{name: name for name in ("Tensor", "int", "float", "bool", "str")},
    **{f"Sequence[{name}]": f"{name}[]" for name in ("Tensor", "int", "float")},
    **{"tuple[Tensor, Tensor]": "(Tensor, Tensor)", "list[Tensor]": "Tensor[]"},
}


def operator(function: Function, name: str = "") -> Function:
    """Register a function as ``torch.ops.bevquant_hybrid.<its name>`` and return that operator.

    Args:
        function: Its annotations, of a module that postpones them, are the schema.
        name: The function's by default, without low lines before it.
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
