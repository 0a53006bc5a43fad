"""What `hybrid_dict` asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

__all__ = ["read_wishes"]


def read_wishes(
    hybrid_dict: Mapping[str, Iterable[Any]] | None,
) -> tuple[tuple[str, ...], tuple[type[nn.Module], ...]]:
    """Names and classes of a `hybrid_dict`.

    Raises:
        ValueError: If it has another key, or a value that is no list of paths or classes.
    """
    given = dict(hybrid_dict or {})
    names = _list_of("module_name", given.pop("module_name", ()), str, "a module's path")
    types = _list_of("module_type", given.pop("module_type", ()), type, "a class")
    if given:
        raise ValueError(
            f"hybrid_dict: unknown key {next(iter(given))!r}; expected module_name or module_type"
        )
    return names, types


def _list_of(key: str, values: Any, kind: type, what: str) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"hybrid_dict: {key} is {values!r}; expected a list, each {what}")
    found = tuple(values)
    for value in found:
        if not isinstance(value, kind):
            raise ValueError(f"hybrid_dict: {key} {value!r}; expected {what}")
    return found
