"""Declares the package's operators, `torch.ops.bevquant_sparse.*`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef


def operator(schema: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Decorator: a function as the operator ``"name(arguments) -> results"`` on every device."""
    name = schema.partition("(")[0]

    def decorate(function: Callable[..., Any]) -> CustomOpDef:
        # Operators change no argument and return none. What reads values (range checks, counts) is
        # done inside them: tracing records the call, and the check runs whenever the graph does.
        return torch.library.custom_op(
            f"bevquant_sparse::{name}", function, mutates_args=(), schema=schema[len(name) :]
        )

    return decorate
