"""``len(x)`` of a tensor and ``int(share * n)``, while a model is exported: counts that stay open."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ._faults import frames, is_authors

__all__ = ["OpenCountError", "counts_in", "open_lengths"]

_OTHERS = frozenset(("torch", "builtins"))
_Scope = dict[str, Any]


@contextmanager
def open_lengths(model: nn.Module, counting: list[_Scope]) -> Iterator[None]:
    """Let the code around a model's forwards count rows as ``x.shape[0]`` does.

    Python demands a plain integer of ``len``, which fixes the number of voxels to the example's,
    and cannot be had of what ``torch.unique`` or a mask leaves over. So the name has another
    meaning meanwhile in the packages of the model's classes and in files of no library. In the
    scopes of `counting` (`counts_in`), ``int`` has, too, for shares of such a number.
    """
    classes = {base for module in model.modules() for base in type(module).__mro__}
    packages = {cls.__module__.partition(".")[0] for cls in classes} - _OTHERS
    found = [
        vars(module)
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and "len" not in vars(module)
        and (name.partition(".")[0] in packages or is_authors(vars(module).get("__file__") or "<>"))
    ]
    asked = torch.SymFloat.__int__

    def whole(number: Any) -> Any:
        scope = _scope_of(sys._getframe(1), counting)
        if scope is not None and not _is_ratio(number):
            raise OpenCountError(scope)
        return asked(number)

    meant: list[tuple[_Scope, str, Any]] = [(scope, "len", _length) for scope in found]
    meant += [(scope, "int", _Integer) for scope in counting]
    for scope, name, meaning in meant:
        scope[name] = meaning
    try:
        with mock.patch.object(torch.SymFloat, "__int__", whole):
            yield
    finally:
        for scope, name, _ in meant:
            scope.pop(name, None)  # a module may have two names


class OpenCountError(Exception):
    """``int(share * n)`` of an open number, in the module of these names."""


def counts_in(error: BaseException, known: list[_Scope]) -> _Scope | None:
    """Names of the author's module whose ``int(…)`` an error may come from; None if known."""
    authors = (f for f, _ in frames(error) if is_authors(f.f_code.co_filename))
    return _scope_of(next(authors, None), known)


def _scope_of(frame: FrameType | None, known: list[_Scope]) -> _Scope | None:
    if frame is None or not is_authors(frame.f_code.co_filename):
        return None
    scope: _Scope = frame.f_globals
    new = "int" in frame.f_code.co_names and "int" not in scope
    return scope if new and all(scope is not other for other in known) else None


def _is_ratio(number: torch.SymFloat) -> bool:
    """Whether sizes are divided by each other, as maps of two strides: a number of the model's."""
    from torch.utils._sympy.functions import FloatTrueDiv, IntTrueDiv  # and sympy

    divisions = number.node.expr.atoms(FloatTrueDiv, IntTrueDiv)
    return any(division.args[1].free_symbols for division in divisions)


def _length(value: Any, /) -> Any:
    if isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], torch.SymInt):
        return value.shape[0]
    return builtins.len(value)  # this module's name may be one of those


class _Truncation(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, builtins.int)

    def __call__(cls, *args: Any) -> Any:
        value = args[0] if args else 0
        value = value.item() if isinstance(value, Tensor) else value
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return torch.sym_int(value)
        return builtins.int(*args)


class _Integer(metaclass=_Truncation):
    """``int``, of open numbers as well."""
