"""``len(x)`` and ``int(share * n)`` in a model while it is exported: counts that stay open."""

from __future__ import annotations

import builtins
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ._faults import is_authors

__all__ = ["open_lengths"]

_OTHERS = frozenset(("torch", "builtins"))
_FOUND: set[str] = set()  # modules that lie in a library
_MODULES: dict[str, list[str]] = defaultdict(list)  # these, by package
_Scope = dict[str, Any]


@contextmanager
def open_lengths(model: nn.Module, shares: list[_Scope]) -> Iterator[None]:
    """Let the code around a model's forwards count rows as ``x.shape[0]`` does.

    Python demands a plain integer of ``len``, which fixes the number of voxels to the example's,
    and cannot be had of what ``torch.unique`` or a mask leaves over. So the name has another
    meaning meanwhile in the packages of the model's classes and in files of no library. ``int``
    has one in the modules of `shares` alone, for it is a class that much else is asked of. Where
    another one takes a share of a number of rows, or ``int(mask.sum() * share)`` of what a tensor
    holds, the names of that module are added to `shares`, and the run ends with an error: it is to
    be made again.
    """
    classes = {base for module in model.modules() for base in type(module).__mro__}
    packages = {cls.__module__.partition(".")[0] for cls in classes} - _OTHERS
    found = [scope for scope in _scopes(packages) if "len" not in scope]
    meant: list[tuple[_Scope, str, Any]] = [(scope, "len", _length) for scope in found]
    meant += [(scope, "int", _Integer) for scope in shares]

    def noted(asked: Callable[[Any], int]) -> Callable[[Any], int]:
        def integer(number: Any) -> int:
            frame = sys._getframe(1)
            if _takes_integers(frame) and _is_share(number):
                shares.append(frame.f_globals)
                raise ValueError("int(…) takes a share of an open number")
            return asked(number)

        return integer

    for scope, name, meaning in meant:
        scope[name] = meaning
    try:
        with ExitStack() as stack:
            for kind in (torch.SymFloat, Tensor):
                integer = noted(kind.__int__)
                stack.enter_context(mock.patch.object(kind, "__int__", integer, create=True))
            yield
    finally:
        for scope, name, _ in meant:
            scope.pop(name, None)  # a module may have two names


def _scopes(packages: set[str]) -> Iterator[_Scope]:
    """Globals of the packages' modules and of files of no library; thousands are in neither."""
    for name in sys.modules.keys() - _FOUND:
        module = sys.modules.get(name)
        if not isinstance(module, ModuleType):
            continue
        if is_authors(vars(module).get("__file__") or "<>"):
            yield vars(module)
        else:
            _FOUND.add(name)
            _MODULES[name.partition(".")[0]].append(name)
    for package in packages:
        modules = [sys.modules.get(name) for name in _MODULES[package]]
        yield from (vars(module) for module in modules if isinstance(module, ModuleType))


def _takes_integers(frame: FrameType) -> bool:
    """Whether an author's code asks for Python's ``int``."""
    code = frame.f_code
    return is_authors(code.co_filename) and "int" in code.co_names and "int" not in frame.f_globals


def _is_share(number: Any) -> bool:
    """Whether a number is computed from counts, and not by dividing sizes by each other.

    That, as of maps of two strides, is a number of the model's; so is an integer that a tensor
    holds (``int(self.grid[0])``), and a float that is taken out of one is the example's.
    """
    if isinstance(number, Tensor):
        return torch.compiler.is_compiling() and number.is_floating_point()
    if not isinstance(number, torch.SymFloat):
        return False
    from torch.utils._sympy.functions import FloatTrueDiv, IntTrueDiv  # and sympy
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    of_floats = (SymT.FLOAT, SymT.UNBACKED_FLOAT)
    floats = any(symbol_is_type(symbol, of_floats) for symbol in number.node.expr.free_symbols)
    divisions = number.node.expr.atoms(FloatTrueDiv, IntTrueDiv)
    return not floats and not any(d.args[1].free_symbols for d in divisions)


def _length(value: Any, /) -> Any:
    if isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], torch.SymInt):
        return value.shape[0]
    return builtins.len(value)  # this module's name may be one of those


class _Truncation(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, builtins.int)

    def __call__(cls, *args: Any) -> Any:
        if not args or not _is_share(args[0]):
            return builtins.int(*args)
        if isinstance(args[0], Tensor):
            return args[0].long().item()
        return torch.sym_int(args[0])


class _Integer(metaclass=_Truncation):
    """``int``, of shares of open numbers as well."""
