"""Operators that operator set 11 lacks, by operators that it has.

Operator set 11 has no GridSample, Einsum and GreaterOrEqual, and neither Clip nor Mod of whole
numbers that runtimes would take:

- ``grid_sample``: the values at 2ⁿ corners (one for ``"nearest"``), gathered, times their weights.
- ``einsum``: a sum, a product value by value, or one of matrices between permutations; of several
  tensors two at a time, as they stand.
- ``clamp`` of whole numbers: comparisons. Their ``remainder`` and ``floor_divide``, by a division
  that drops the rest, stand with those of floats in `_plain_forms`.
- ``upsample_trilinear3d``: bilinear in height and width, then along depth.
- ``x >= y``: greater or equal, by two operators; ``threshold`` and ``hardshrink`` by it.
- ``tril`` and ``triu``: zeros where a column's number less the row's is too large or small.
- ``isnan``: x ≠ x; ``isinf``: |x| = ∞; ``isfinite``: |x| < ∞; exclusive or of truth values: ≠.
  Horizon's mapper takes the comparisons alone.
- ``logit(x, eps)``: log(z / (1 − z)), z = x clipped to [ε, 1 − ε]; torch's exporter compares.

Computations along an axis without an operator: ranks, positions in a list, products, distances.

- ``kthvalue`` and ``median``: of the values in order, the k-th; the lower one of two in the middle.
  The median of values with a NaN is NaN.
- ``searchsorted`` and ``bucketize``: number of the list's values below a value, with ``right`` also
  those equal to it. ``torch`` puts NaN after all of them.
- ``cumprod``: x[i] ← x[i] · x[i − s] for s = 1, 2, 4, …: log₂ n products, in another order than
  torch's, so that last bits may differ. ``cummax`` and ``cummin``: the same with the larger or
  smaller of two, at equal values the later place; NaN stays.
- ``interpolate(antialias=True)``: a product of matrices for each of the two axes. A row of them has
  the filter's value at each place of x, over their sum; the filter is as wide as the step.
- ``cdist``: (Σ |a − b|ᵖ)^(1/p) of all pairs of rows; torch has a product of matrices for p = 2 and
  many rows, which loses digits of small distances.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

FIRST_GRID_SAMPLE, FIRST_VOLUME_SAMPLE = 16, 20  # operator sets
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _grid_sample(x: Tensor, grid: Tensor, mode: int, padding: int, corners: bool) -> Tensor | None:
    """Values of x ``[batch, channels, *space]`` at a grid ``[batch, *outputs, axes]``."""
    if mode not in (0, 1):  # bicubic
        return None
    choices: list[list[tuple[Tensor, list[Tensor]]]] = []
    for axis, size in enumerate(reversed(x.shape[2:])):
        at = _source_place(grid[..., axis], size, padding, corners)
        low = at.floor()
        places = [(at.round(), [])] if mode == 1 else [(low, [low + 1 - at]), (low + 1, [at - low])]
        choices.append([])
        for place, shares in places:
            # Once each: onnxscript loses the limits of a value that is clipped several times.
            inside = place.clamp(0, size - 1)
            seen = [(inside == place).to(x.dtype)] if padding == _ZEROS else []
            choices[-1].append((inside.long(), [*shares, *seen]))
    values, total = x.flatten(2), None
    for corner in itertools.product(*choices):
        index, weight, step = None, None, 1
        for (inside, shares), size in zip(corner, reversed(x.shape[2:]), strict=True):
            for one in shares:
                weight = one if weight is None else weight * one
            part = inside * step
            index, step = part if index is None else index + part, step * size
        assert index is not None
        rows = index.flatten(1)[:, None].expand(-1, x.shape[1], -1)
        taken = values.gather(2, rows)
        if weight is not None:
            taken = taken * weight.flatten(1)[:, None]
        total = taken if total is None else total + taken
    assert total is not None
    return total.reshape(-1, x.shape[1], *grid.shape[1:-1])


def _source_place(at: Tensor, size: int, padding: int, corners: bool) -> Tensor:
    """−1…1 as places of pixels; those beyond the border folded back or held."""
    at = (at + 1) * ((size - 1) / 2) if corners else ((at + 1) * size - 1) / 2
    if padding == _REFLECTION:
        low, span = (0.0, size - 1.0) if corners else (-0.5, float(size))
        if span == 0:
            return torch.zeros_like(at)
        away = (at - low).abs()
        away = away - (away / (2 * span)).floor() * (2 * span)
        at = torch.minimum(away, 2 * span - away) + low
    return at if padding == _ZEROS else at.clamp(0, size - 1)


def _trilinear(x: Tensor, size: Any, corners: bool, scales: Any = None, *more: Any) -> Tensor:
    """Each slice of ``[batch, channels, depth, height, width]``, then each line of depth."""
    bilinear = torch.ops.aten.upsample_bilinear2d.default
    given = (scales, *more) if more or scales is None or isinstance(scales, float) else scales
    deep, high, wide = given if len(given) == 3 else (None, None, None)
    if size is None:
        size = [int(n * scale) for n, scale in zip(x.shape[2:], given, strict=True)]
    slices = bilinear(x.flatten(1, 2), list(size[1:]), corners, high, wide)
    lines = slices.reshape(*x.shape[:3], -1)
    made: Tensor = bilinear(lines, [size[0], lines.shape[-1]], corners, deep, None)
    return made.reshape(*made.shape[:3], *slices.shape[-2:])


def _einsum(equation: str, *operands: Any, path: Any = None) -> Tensor | None:
    if len(operands) == 1 and not isinstance(operands[0], Tensor):
        operands = tuple(operands[0])
    given, arrow, out = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    once = all(len(set(term)) == len(term) for term in terms)
    if "." in equation or not once or len(terms) != len(operands):
        return None
    if not arrow:
        out = "".join(sorted(label for label in set(given) - {","} if given.count(label) == 1))
    if len(terms) > 2:
        read = dict.fromkeys(terms[0] + terms[1])
        kept = "".join(label for label in read if label in "".join([*terms[2:], out]))
        pair = _einsum(f"{terms[0]},{terms[1]}->{kept}", *operands[:2])
        others = f"{','.join([kept, *terms[2:]])}->{out}"
        return None if pair is None else _einsum(others, pair, *operands[2:])
    rest = [set("".join(terms[:k] + terms[k + 1 :]) + out) for k in range(len(terms))]
    summed = [_summed(x, t, keep) for x, t, keep in zip(operands, terms, rest, strict=True)]
    if len(summed) == 1:
        x, term = summed[0]
        return x.permute([term.index(label) for label in out])
    (a, left), (b, right) = summed
    shared = [label for label in left if label in right]
    if any(a.shape[left.index(label)] != b.shape[right.index(label)] for label in shared):
        return None
    batch = [label for label in shared if label in out]
    inner = [label for label in shared if label not in out]
    rows, columns = ([n for n in term if n not in shared] for term in (left, right))
    sizes = dict(zip(left, a.shape, strict=True)) | dict(zip(right, b.shape, strict=True))

    if not inner:
        # No sum: of products of matrices as small as 1×1 onnxscript's optimizer drops the shapes.
        spread = [
            x.permute([term.index(label) for label in out if label in term]).reshape(
                [sizes[label] if label in term else 1 for label in out]
            )
            for x, term in ((a, left), (b, right))
        ]
        return spread[0] * spread[1]

    def matrices(x: Tensor, term: str, one: Sequence[str], other: Sequence[str]) -> Tensor:
        x = x.permute([term.index(label) for label in (*batch, *one, *other)])
        ends = [math.prod(sizes[label] for label in labels) for labels in (one, other)]
        return x.reshape([*(sizes[label] for label in batch), *ends])

    product = matrices(a, left, rows, inner) @ matrices(b, right, inner, columns)
    order = [*batch, *rows, *columns]
    product = product.reshape([sizes[label] for label in order])
    return product.permute([order.index(label) for label in out])


def _summed(x: Tensor, term: str, keep: set[str]) -> tuple[Tensor, str]:
    """Without the axes that nothing else has."""
    axes = [axis for axis, label in enumerate(term) if label not in keep]
    kept = "".join(label for label in term if label in keep)
    return (x.sum(axes) if axes else x), kept


def _clamp(x: Tensor, min: Any = None, max: Any = None) -> Tensor | None:
    if x.is_floating_point():
        return None
    for limit, is_beyond in ((min, torch.lt), (max, torch.gt)):
        if limit is not None:
            x = torch.where(is_beyond(x, limit), limit, x)
    return x


def _part_of(compare: Callable[..., Tensor], one: int, x: Tensor, diagonal: int = 0) -> Tensor:
    rows, columns = (torch.arange(x.shape[axis], device=x.device) for axis in (-2, -1))
    kept = compare(columns[None] - rows[:, None], diagonal + one)
    return torch.where(kept, x, torch.zeros_like(x))


def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    within = x if eps is None else x.clamp(eps, 1 - eps)
    return torch.log(within / (1 - within))


def _or_equal(compare: Callable[..., Tensor], x: Any, y: Any) -> Tensor:
    same: Tensor = x == y
    return compare(x, y) | same


GRID_SAMPLES: MappingProxyType[str, Callable[..., Tensor | None]] = MappingProxyType(
    dict.fromkeys(("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), _grid_sample)
)
"""Of every operator set before the one that has it."""


VOLUME_SAMPLES: MappingProxyType[str, Callable[..., Tensor | None]] = MappingProxyType(
    dict.fromkeys(
        ("grid_sampler", "grid_sampler_3d"),
        lambda x, *given: _grid_sample(x, *given) if x.dim() == 5 else None,
    )
)
"""Of operator sets whose GridSample takes maps of two axes alone, as TensorRT's in any set."""


OLD_SET_FORMS: MappingProxyType[str, Callable[..., Tensor | None]] = MappingProxyType(
    {
        "einsum": _einsum, "clamp": _clamp, "clamp_min": lambda x, min: _clamp(x, min=min),
        "clamp_max": lambda x, max: _clamp(x, max=max),
        "upsample_trilinear3d": _trilinear, "logit": _logit,
        "tril": partial(_part_of, torch.lt, 1), "triu": partial(_part_of, torch.gt, -1),
        "threshold": lambda x, threshold, value: torch.where(
            _or_equal(torch.lt, x, threshold), value, x
        ),
        "hardshrink": lambda x, lambd=0.5: torch.where(_or_equal(torch.lt, x.abs(), lambd), 0.0, x),
        "isnan": lambda x: x != x, "isinf": lambda x: x.abs() == math.inf,
        "isfinite": lambda x: x.abs() < math.inf,
        "bitwise_xor": lambda x, y: x != y if x.dtype == torch.bool else None,
        "logical_xor": lambda x, y: x.bool() != y.bool(),
        "ge": partial(_or_equal, torch.gt), "le": partial(_or_equal, torch.lt),
    }
)  # fmt: skip
"""Name of a function of torch → the same in operator set 11; None where it cannot be."""


def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, places = torch.sort(x, dim)
    taken = [part.narrow(dim, k - 1, 1) for part in (values, places)]
    first, second = taken if keepdim else [part.squeeze(dim) for part in taken]
    return first, second


def _median(
    x: Tensor, dim: int | None = None, keepdim: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    line, axis = (x.reshape(-1), 0) if dim is None else (x, dim)
    values, places = _kthvalue(line, (line.shape[axis] + 1) // 2, axis, keepdim)
    if x.is_floating_point():
        wrong = (line != line).any(axis, keepdim)
        values = torch.where(wrong, math.nan, values)
    return values if dim is None else (values, places)


def _searchsorted(
    line: Tensor,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor | None:
    if sorter is not None or not isinstance(x, Tensor):
        return None
    if side is not None:
        right = side == "right"
    one = line if line.dim() == 1 else line.unsqueeze(-2)
    at = x.unsqueeze(-1)
    behind = one > at
    beyond = behind if right else behind | (one == at)
    count = (~beyond).to(torch.int64).sum(-1)
    return count.to(torch.int32) if out_int32 else count


def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    return _so_far(lambda before, own: [before[0] * own[0]], dim, x)[0]


def _extreme_so_far(beyond: Callable[..., Tensor], x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    def joined(before: list[Tensor], own: list[Tensor]) -> list[Tensor]:
        kept = beyond(before[0], own[0])
        if x.is_floating_point():
            kept = kept | ((before[0] != before[0]) & (own[0] == own[0]))
        return [torch.where(kept, *both) for both in zip(before, own, strict=True)]

    size = x.shape[dim]
    places = torch.arange(size, device=x.device).view(-1, *[1] * (x.dim() - dim % x.dim() - 1))
    values, places = _so_far(joined, dim, x, places.expand(x.shape))
    return values, places


def _so_far(
    joined: Callable[[list[Tensor], list[Tensor]], list[Tensor]], dim: int, *given: Tensor
) -> list[Tensor]:
    """All values up to each place along an axis, joined two at a time."""
    made, step = list(given), 1
    while step < (size := given[0].shape[dim]):
        before, own = ([x.narrow(dim, at, size - step) for x in made] for at in (0, step))
        both = zip(made, joined(before, own), strict=True)
        made = [torch.cat([x.narrow(dim, 0, step), rest], dim) for x, rest in both]
        step *= 2
    return made


def _cdist(a: Tensor, b: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    apart = (a.unsqueeze(-2) - b.unsqueeze(-3)).abs()
    if p == 0:
        return (apart != 0).to(a.dtype).sum(-1)
    if p == math.inf:
        return apart.amax(-1)
    if p == 1:
        return apart.sum(-1)
    return (apart * apart).sum(-1).sqrt() if p == 2 else (apart**p).sum(-1) ** (1 / p)


def _antialiased(
    weight: Callable[[Tensor], Tensor], x: Tensor, size: Any, corners: bool, *scales: Any
) -> Tensor:
    given = scales[0] if scales and isinstance(scales[0], list | tuple) else scales
    factors = [*given, None, None][:2]
    if size is None:
        size = [int(n * factor) for n, factor in zip(x.shape[2:], factors, strict=True)]
    rows, columns = (
        _shares(weight, x, *sizes, corners)
        for sizes in zip(x.shape[2:], size, factors, strict=True)
    )
    return rows @ x @ columns.mT


def _shares(
    weight: Callable[[Tensor], Tensor], x: Tensor, n: int, m: int, factor: Any, corners: bool
) -> Tensor:
    """Shares ``[m, n]`` of n values in m results; places as in torch, also with aligned corners."""
    if corners:
        step = (n - 1) / (m - 1) if m > 1 else 0.0
    else:
        step = 1 / factor if factor else n / m
    centers, places = (
        torch.arange(count, dtype=x.dtype, device=x.device) + 0.5 for count in (m, n)
    )
    found = weight((places - step * centers[:, None]).abs() / max(step, 1.0))
    return found / found.sum(1, keepdim=True)


def _triangle(away: Tensor) -> Tensor:
    return (1 - away).clamp(min=0)


def _cubic(away: Tensor) -> Tensor:
    """Keys' filter with a = −1/2, as torch's for antialiasing."""
    near, far = (1.5 * away - 2.5) * away * away + 1, ((2.5 - 0.5 * away) * away - 4) * away + 2
    return torch.where(away < 1, near, torch.where(away < 2, far, 0.0))


AXIS_FORMS: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {
        "_upsample_bilinear2d_aa": partial(_antialiased, _triangle),
        "_upsample_bicubic2d_aa": partial(_antialiased, _cubic),
        "kthvalue": _kthvalue, "median": _median, "searchsorted": _searchsorted,
        "bucketize": lambda x, line, **how: _searchsorted(line, x, **how), "cumprod": _cumprod,
        "cummax": partial(_extreme_so_far, torch.gt), "cdist": _cdist,
        "cummin": partial(_extreme_so_far, torch.lt),
    }
)  # fmt: skip
"""Name of a function of torch → the same of what every runtime has; None where it cannot be."""
