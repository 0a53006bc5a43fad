"""Arguments of another kind than annotated are refused where a function is entered."""

from __future__ import annotations

import functools
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def checked_kinds(
    function: Callable[_Given, _Result], names: Mapping[str, Any] | None = None
) -> Callable[_Given, _Result]:
    """Decorate a function to refuse arguments whose class is not the annotated one.

    Unions, paths, functions and the items of lists and tuples are checked. Numbers, literals and
    tensors are left to the function, and so are annotations that exist for type checkers only.

    Args:
        function: With annotations.
        names: Classes that its module imports for type checkers only.

    Raises:
        TypeError: The function was called with another kind. The message has its name and the
            argument's, the expected class and the given one.

    Example:
        >>> @checked_kinds
        ... def size(path: Path) -> int:
        ...     return path.stat().st_size
        >>> size([1, 2])
        Traceback (most recent call last):
        ...
        TypeError: size: path: expected Path, got list
    """
    signature = inspect.signature(function)

    @functools.cache
    def kinds() -> dict[str, Any]:
        return {
            name: _resolved(one, function, names or {})
            for name, one in signature.parameters.items()
        }

    @functools.wraps(function)
    def checked(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # Python's own message is better
            return function(*args, **kwargs)
        for name, value in given.items():
            if not _fits(value, kinds()[name]):
                came = f" {str(value)!r:.60}" if isinstance(value, str | Path) else ""
                if isinstance(value, list | tuple) and value:
                    came = f" of {type(value[0]).__name__}"
                raise TypeError(
                    f"{function.__name__}: {name}: expected "
                    f"{signature.parameters[name].annotation}, got {type(value).__name__}{came}"
                )
        return function(*args, **kwargs)

    return checked


def check_public(package: MutableMapping[str, Any]) -> None:
    """Let a package's public functions refuse arguments of wrong kinds: see `checked_kinds`.

    Functions of tensors are left alone: networks call them, and check their values themselves.

    Args:
        package: The names in its ``__init__``, ``globals()``.
    """
    for name in package["__all__"]:
        function = package[name]
        if inspect.isfunction(function):
            first = next(iter(inspect.signature(function).parameters.values()), None)
            if first is not None and not re.search(r"\bTensor\b", str(first.annotation)):
                package[name] = checked_kinds(function, package)
                package[name].__module__ = package["__name__"]  # where pickle finds it


def _resolved(
    parameter: inspect.Parameter, function: Callable[..., Any], names: Mapping[str, Any]
) -> Any:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return Any
    try:
        own = getattr(inspect.unwrap(function), "__globals__", {})
        return eval(str(parameter.annotation), {**names, **own})
    except (NameError, SyntaxError, TypeError, AttributeError):  # for type checkers only
        return Any


def _fits(value: Any, kind: Any) -> bool:
    kind = getattr(kind, "__bound__", None) or kind  # of a TypeVar
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if kind is None or origin is typing.Literal or kind in (int, float, bool, complex):
        return kind is not None or value is None
    if origin is os.PathLike:
        return isinstance(value, os.PathLike)
    plain = origin or kind
    if plain in (list, tuple):
        plain = Iterable
    if not inspect.isclass(plain):
        return True
    try:
        if not isinstance(value, plain) and not (
            plain in (Iterable, Sequence) and hasattr(value, "__getitem__")  # loops take it
        ):
            return False
    except TypeError:  # a protocol without members at run time
        return True
    if isinstance(value, str | bytes):
        return origin is None  # not as a sequence
    alike = len(inner) == 1 or inner[1:] == (...,)
    return not (alike and isinstance(value, list | tuple)) or all(_fits(v, inner[0]) for v in value)
