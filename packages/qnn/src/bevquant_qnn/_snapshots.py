"""Inputs and outputs of a call, stored for comparison and reuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bevquant_graph import is_sparse_tensor, refilled
from bevquant_qnn._sparse_tensor import with_features

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# Different tensors nearly always differ early.
_GLANCE = 256


class UnknownValue(Exception):
    """A value that cannot be kept: neither tensors, plain values, nor containers of them."""


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in tuples, lists and dicts; of sparse tensors features and indices."""
    if isinstance(value, Tensor):
        yield value
    elif is_sparse_tensor(value):
        yield value.features
        yield value.indices
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)
    elif not isinstance(value, _PLAIN):
        raise UnknownValue(type(value).__qualname__)


def float_tensors(value: Any) -> list[Tensor]:
    """The floating-point ones of `tensors`."""
    return [tensor for tensor in tensors(value) if tensor.is_floating_point()]


def kept(value: Any) -> Any:
    """Return `value` in containers of its own, its tensors the same objects."""
    return mapped(value, lambda tensor: tensor)


def copied(value: Any) -> Any:
    """Return `value` with copies of its dense tensors and of sparse features."""
    return mapped(value, torch.clone)


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal bit for bit, without NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _same_tensor(a, b)
    if is_sparse_tensor(a) and is_sparse_tensor(b):
        return (
            _same_tensor(a.features, b.features)
            and _same_tensor(a.indices, b.indices)
            and list(a.spatial_shape) == list(b.spatial_shape)
            and a.batch_size == b.batch_size
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return isinstance(a, _PLAIN) and bool(a == b)


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.is_contiguous() and b.is_contiguous():
        if a.data_ptr() == b.data_ptr():
            return True
        first = slice(0, _GLANCE)
        if not torch.equal(a.reshape(-1)[first], b.reshape(-1)[first]):
            return False
    return torch.equal(a, b)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with its dense tensors and sparse features changed, in `tensors`' order."""
    if isinstance(value, Tensor):
        return change(value)
    if is_sparse_tensor(value):
        fresh = with_features(value, change(value.features))
        # Later layers add their rulebooks to it.
        if hasattr(fresh, "indice_dict"):
            fresh.indice_dict = dict(value.indice_dict)
        return fresh
    if isinstance(value, dict):
        return type(value)((key, mapped(item, change)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return refilled(type(value), [mapped(item, change) for item in value])
    return value
