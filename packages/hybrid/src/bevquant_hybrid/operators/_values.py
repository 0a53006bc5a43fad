"""Find the tensors among arguments and results, whatever holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["shape_of", "tensors_in"]


def tensors_in(value: Any) -> Iterator[Any]:
    """Every tensor, and everything that has a shape and a dtype like one, inside ``value``."""
    if isinstance(value, Tensor) or (hasattr(value, "shape") and hasattr(value, "dtype")):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape as plain integers."""
    return tuple(int(size) for size in value.shape)
