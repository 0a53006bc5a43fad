"""Calls that say the same in several ways, or nothing that a program needs to hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["OF_NUMBERS", "OF_SHAPE", "canonical", "only_moves"]

_SAME = ("aten::alias", "aten::detach", "aten::lift_fresh")  # the same values
# Constants: they read a shape alone.
OF_SHAPE = (
    *("aten::zeros_like", "aten::ones_like", "aten::full_like"),
    *("aten::new_zeros", "aten::new_ones", "aten::new_full"),
)
_RESHAPES = ("aten::view", "aten::_unsafe_view", "aten::_reshape_alias")
# A traced graph holds numbers as tensors, but torch hands them over as numbers.
OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "aten::_local_scalar_dense": lambda number: number,
    "aten::equal": lambda one, other: type(one) is type(other) and one == other,
}


def only_moves(name: str, given: Mapping[str, Any]) -> bool:
    """Whether a call puts the same values in the same order into other memory."""
    source: Any = given.get("self")
    if name in _SAME:
        return True
    if name == "aten::_to_copy":
        return given.get("dtype") in (None, source.dtype)
    if name == "aten::clone":
        # A change of order stays in the program: sums of floats depend on it.
        return source.is_contiguous() or given.get("memory_format") != torch.contiguous_format
    if name == "aten::as_strided_":
        # Of axes of length one, as pooling to one pixel does: that says nothing.
        wide = [i for i, size in enumerate(source.shape) if size > 1]
        sizes, strides = given["size"], given["stride"]
        same = list(sizes) == list(source.shape) and given.get("storage_offset") is None
        return same and all(strides[i] == source.stride(i) for i in wide)
    return False


def canonical(name: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the operator that a program holds in the place of this one, and its arguments."""
    if name in _RESHAPES:
        shape = given.get("size", given.get("shape"))
        return "aten::reshape", {"self": given["self"], "shape": shape}
    if name == "aten::_to_copy":
        return "aten::to.dtype", {"self": given["self"], "dtype": given["dtype"]}
    if name == "aten::clone":
        return "aten::contiguous", {"self": given["self"]}
    return name, given
