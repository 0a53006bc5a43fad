"""Attributes and members of values that a forward gets, and equality by them."""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "sympy"}


def leaves(value: Any) -> Iterator[Any]:
    """Members of nested lists, tuples and mappings, in order.

    Example:
        >>> list(leaves([1, {"a": (2, 3)}]))
        [1, 2, 3]
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def attributes_of(value: Any) -> list[str]:
    """Names of the attributes of an object that a forward may write to."""
    kind = type(value)
    if isinstance(value, nn.Module | type) or not getattr(kind, "is_read_by_forwards", True):
        return []
    own = kind.__module__.partition(".")[0] not in _LIBRARIES
    if not own and not issubclass(kind, types.SimpleNamespace | Mapping):
        return []
    try:
        names = dict.fromkeys(object.__getattribute__(value, "__dict__"))
    except AttributeError:  # slots
        names = {}
    if is_dataclass(value):
        names |= dict.fromkeys(f.name for f in fields(value) if _has(value, f.name))
    return list(names)


def _has(value: Any, name: str) -> bool:
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True


def frames_remedy(value: Any) -> str:
    """What makes a constant a value of the frame, for messages; "" where nothing does.

    Example:
        >>> frames_remedy(0.5)
        ', or with a list of frames that differ in it, which makes it an input'
        >>> frames_remedy("a"), frames_remedy(True)
        ('', '')
    """
    if isinstance(value, float | np.ndarray):
        return ", or with a list of frames that differ in it, which makes it an input"
    return ""


def same_constant(one: Any, other: Any, _met: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two constants are equal; objects without equality are compared by their attributes.

    Example:
        >>> same_constant("a", "a"), same_constant(True, 1), same_constant(0.5, 0.25)
        (True, False, False)
        >>> from types import SimpleNamespace
        >>> same_constant(SimpleNamespace(a=[torch.ones(2)]), SimpleNamespace(a=[torch.ones(2)]))
        True
    """
    pair = id(one), id(other)
    if one is other or pair in _met:  # an object may lead back to itself
        return True
    if type(one) is not type(other):
        return False
    met = _met | {pair}
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple | dict | deque):
        if isinstance(one, dict) and one.keys() != other.keys():
            return False
        keys = one if isinstance(one, dict) else range(len(one))
        return len(one) == len(other) and all(
            same_constant(one[key], other[key], met) for key in keys
        )
    # Python's own equality asks for the truth of tensors.
    own: Any = type(one).__eq__
    plain = is_dataclass(one) or own in (object.__eq__, types.SimpleNamespace.__eq__)
    if names := attributes_of(one) if plain else []:
        return names == attributes_of(other) and all(
            same_constant(object.__getattribute__(one, n), object.__getattribute__(other, n), met)
            for n in names
        )
    equal = one == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
