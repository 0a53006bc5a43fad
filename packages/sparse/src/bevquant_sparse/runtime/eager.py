"""Keep torch.compile out of code that fills memory with kernels of its own.

Its tracer replaces numpy's arrays by tensors. Alignment and ownership of the memory are lost then:
kernels returned wrong numbers or wrote outside of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def eager(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator: a function that `torch.compile` calls as it is, with everything that it calls.

    `torch.compiler.disable` imports the compiler, which takes seconds. It is applied on the first
    call in a process that has imported it.

    Example:
        >>> @eager
        ... def double(x):
        ...     return torch.from_numpy(2 * x.numpy())
        >>> torch.compile(double, backend="eager")(torch.ones(2))
        tensor([2., 2.])
    """
    made: list[Callable[_P, _T]] = []

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.compiler.is_dynamo_compiling() and "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not made:
            made.append(torch.compiler.disable(function))
        return made[0](*args, **kwargs)

    return run
