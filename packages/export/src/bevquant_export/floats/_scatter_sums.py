"""Sums and maxima over places, in the values' order and for engines whose scatters reduce nothing.

ONNX Runtime's ScatterND that sums runs on several threads, which write to a place of several values
at once: sums depend on the run. Its ScatterElements takes the values one after the other, as torch
does. ``scatter_add`` is written so; ``index_add`` and ``index_put`` that sum become one.

Where scatters do not sum, they are products with a matrix of 0 and 1.

``index_add(y, i, x)`` is ``y + P x`` with ``P[c, n] = (i[n] == c)``, a row for each place and a
column for each value; ``index_put(y, (i, j), x, accumulate=True)`` the same at ``i · J + j``, where
places below zero count from the end. In a ``scatter_add`` each value has a place of its own, so
that there is a matrix for each column of x. Places × values are its entries: a small grid fits; one
of a car's surroundings does not, and is refused.

``scatter_reduce`` that sums is a ``scatter_add``; its mean is one of the values over one of ones,
which no version of ONNX has by itself. Its maximum is the largest x of a place's row where P is 1;
where it is 0, y's own value or the least of x is taken. Its minimum: min(y, x) = -max(-y, -x).
``index_reduce`` is a ``scatter_reduce`` whose index is the same in every column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

_MOST = 2**26  # entries of the matrix


def _scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    x, chosen, src = _chosen(x, dim, index, src)
    return (x + (chosen.to(x.dtype) * src).sum(1)).movedim(0, dim)


def _scatter_max(x: Tensor, dim: int, index: Tensor, src: Tensor, include_self: bool) -> Tensor:
    x, chosen, src = _chosen(x, dim, index, src)
    others = x[:, None] if include_self else src.amin(0)
    largest = torch.where(chosen, src, others).amax(1)
    if include_self:
        return torch.maximum(x, largest).movedim(0, dim)
    return torch.where(chosen.any(1), largest, x).movedim(0, dim)


def _chosen(x: Tensor, dim: int, index: Tensor, src: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With `dim` in front: x, the matrix ``[places, values, …]``, and src."""
    dim %= x.dim()
    corner = tuple(slice(size) for size in index.shape)
    if any(_example(a) < _example(b) for a, b in zip(index.shape, src.shape, strict=True)):
        src = src[corner]
    whole = (_example(a) == _example(b) for a, b in zip(index.shape, x.shape, strict=True))
    if not all(same or axis == dim for axis, same in enumerate(whole)):
        raise ValueError("a scatter that leaves part of an axis has no form as a product")
    _limit(x.shape[dim], index.shape)
    x, index, src = (t.movedim(dim, 0) for t in (x, index, src))
    places = torch.arange(x.shape[0], device=x.device).view([-1] + [1] * x.dim())
    return x, index == places, src


def _scatter_reduce(
    add: Callable[[Tensor, int, Tensor, Tensor], Tensor],
    x: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor | None:
    if reduce not in ("sum", "mean"):
        return None
    if reduce == "sum" and include_self:
        return add(x, dim, index, src)
    counts = add(torch.zeros_like(x), dim, index, torch.ones_like(src))
    own = x if include_self else torch.where(counts > 0, torch.zeros_like(x), x)
    total = add(own, dim, index, src)
    if reduce == "sum":
        return total
    return total / (counts + 1 if include_self else counts.clamp(min=1))


def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    dim %= x.dim()
    moved, values = x.movedim(dim, 0), source.movedim(dim, 0)
    rows = values.reshape([values.shape[0], -1])
    summed = _sums(index, moved.shape[0], rows * alpha, x.dtype)
    return (moved + summed.reshape(moved.shape)).movedim(0, dim)


def _index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor | None:
    if not accumulate:
        return None
    found = _rows_of(x, indices, values)
    if found is None:
        raise ValueError("an index_put that sums at some axes alone has no form as a product")
    rows, place, values = found
    return (rows + _sums(place, rows.shape[0], values, x.dtype)).reshape(x.shape)


def _rows_of(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Rows at the places that are indexed, a place for each value, and values; None of a mask."""
    given = [index for index in indices if index is not None]
    if len(given) < len(indices) or any(index.dtype == torch.bool for index in given):
        return None
    count = len(given)
    given = list(torch.broadcast_tensors(*given))
    values = values.expand([*given[0].shape, *x.shape[count:]])
    place: Any = 0
    for index, size in zip(given, x.shape, strict=False):
        place = place * size + torch.where(index < 0, index + size, index)
    rows = x.reshape([math.prod(x.shape[:count]), -1])
    return rows, place.flatten(), values.reshape([-1, rows.shape[1]])


def _ordered_index_add(
    x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1
) -> Tensor:
    dim %= max(x.dim(), 1)
    values = source if alpha == 1 else source * alpha
    shape = [-1 if axis == dim else 1 for axis in range(values.dim())]
    return x.scatter_add(dim, index.long().reshape(shape).expand_as(values), values)


def _ordered_index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor | None:
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    if not accumulate or any(i is not None and i.dtype == torch.bool for i in indices):
        return None  # a mask names each place once
    first, count = axes[0], len(axes)
    if axes != list(range(first, first + count)):
        raise ValueError("an index_put that sums at axes apart from each other has no form")
    given = [index for index in indices if index is not None]
    spread = torch.broadcast_tensors(*given)[0].dim()
    shape = [*x.shape[:first], *torch.broadcast_tensors(*given)[0].shape, *x.shape[first + count :]]
    moved = x.movedim(axes, list(range(count)))
    values = values.expand(shape)
    values = values.movedim(list(range(first, first + spread)), list(range(spread)))
    found = _rows_of(moved, given, values)
    assert found is not None
    rows, place, values = found
    summed = rows.scatter_add(0, place.long()[:, None].expand_as(values), values)
    return summed.reshape(moved.shape).movedim(list(range(count)), axes)


def _sums(place: Tensor, places: Any, values: Tensor, dtype: torch.dtype) -> Tensor:
    _limit(places, place.shape)
    chosen = torch.arange(places, device=place.device)[:, None] == place[None]
    return chosen.to(dtype) @ values


def _limit(places: Any, shape: Sequence[Any]) -> None:
    values = math.prod(map(_example, shape))
    if _example(places) * values > _MOST:
        raise ValueError(
            f"it gathers {values} values at {_example(places)} places; the engine has no scatter "
            "that sums or compares, and as a product of matrices one had "
            f"{_example(places) * values:.1e} entries, {_MOST:.1e} at most. Let a plugin "
            "pool them (bev_pool), and export the parts before and behind it; or pool in a "
            "smaller grid"
        )


def _example(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _scatter_reduce_as_product(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor | None:
    if reduce == "amax":
        return _scatter_max(x, dim, index, src, include_self)
    if reduce == "amin":
        return -_scatter_max(-x, dim, index, -src, include_self)
    return _scatter_reduce(_scatter_add, x, dim, index, src, reduce, include_self=include_self)


def _index_reduce(
    as_scatter: Callable[..., Tensor | None],
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True,
) -> Tensor | None:  # fmt: skip
    dim %= max(x.dim(), 1)
    shape = [-1 if axis == dim else 1 for axis in range(source.dim())]
    given = x, dim, index.long().reshape(shape).expand_as(source), source, reduce
    made = as_scatter(*given, include_self=include_self)
    return x.scatter_reduce(*given[1:], include_self=include_self) if made is None else made


ORDERED_SUMS: dict[str, Callable[..., Tensor | None]] = {
    "index_add": _ordered_index_add, "index_put": _ordered_index_put,
    "scatter_reduce": partial(_scatter_reduce, torch.scatter_add),
    "index_reduce": partial(_index_reduce, partial(_scatter_reduce, torch.scatter_add)),
}  # fmt: skip
SCATTER_SUMS: dict[str, Callable[..., Tensor | None]] = {
    "scatter_add": _scatter_add, "index_add": _index_add, "index_put": _index_put,
    "scatter_reduce": _scatter_reduce_as_product,
    "index_reduce": partial(_index_reduce, _scatter_reduce_as_product),
}  # fmt: skip
