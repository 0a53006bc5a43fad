"""The arguments of a call: which become values of the program, which are constants of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bevquant_graph import (
    frames_remedy,
    input_tensor,
    is_sparse_tensor,
    members_of,
    refuse_other_members,
    same_constant,
)
from bevquant_int8sim.model._step import Ref

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_value(value: object) -> bool:
    return isinstance(value, Tensor | Ref) or is_sparse_tensor(value) or _is_number(value)


def bind(signature: Arguments, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name to value for a call with `args` and `kwargs`."""
    found: dict[str, Any] = {}
    wanted, named_wanted = signature
    if len(args) != len(wanted) or kwargs.keys() != named_wanted.keys():
        raise TypeError(
            f"expected {_counted(wanted, named_wanted)} like the example inputs, got "
            f"{_counted(args, kwargs)}"
        )
    _bind(list(wanted), list(args), "inputs", found)
    _bind(dict(named_wanted), {name: kwargs[name] for name in named_wanted}, "named inputs", found)
    return found


def _counted(args: Any, kwargs: Mapping[str, Any]) -> str:
    names = f" and the named ones {', '.join(kwargs)}" if kwargs else ""
    return f"{len(args)} positional inputs{names}"


def _bind(wanted: Any, got: Any, where: str, found: dict[str, Any]) -> None:
    if isinstance(wanted, Ref):
        got = input_tensor(got)
        if not _is_value(got):
            raise TypeError(f"{where}: expected a tensor or a number, got {type(got).__name__}")
        found[wanted.name] = got
        return
    children = members_of(wanted)
    if children is None:
        if not same_constant(wanted, got):
            raise ValueError(
                f"{where}: the model was simulated with {wanted!r} here and got {got!r}; simulate "
                f"it again with example inputs like these{frames_remedy(wanted)}"
            )
        return
    theirs = members_of(got)
    if theirs is None:
        raise TypeError(f"{where}: expected members {[*children]}, got {type(got).__name__}")
    refuse_other_members(children, theirs, where)
    for key, child in children.items():
        _bind(child, theirs[key], f"{where}[{key!r}]", found)
