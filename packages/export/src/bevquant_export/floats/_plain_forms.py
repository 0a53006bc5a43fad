"""Operators that runtimes lack, directly or in their usual form, by plain ones.

- ``atan2(y, x)`` = ±(π/2 − a where |y| > |x|, π − … where x < 0), a = atan(min / max of |y|, |x|).
  torch's exporter divides y by x, finds 0 / 0 by IsNaN, and returns −π for y = 0 < −x. The sign of
  −0 is kept, by its reciprocal; infinite over infinite is NaN here.
- ``argsort`` and ``sort`` with ``stable=True``: ONNX's TopK takes the earlier of two equal values
  first.
- ``floor_divide``, ``div(…, rounding_mode="floor")`` and ``remainder`` of floats: by ``fmod``,
  which is exact, as torch computes them. The quotient that torch's exporter rounds down may have
  been rounded up to the next whole number: a point in the voxel beside its own. ``div`` of integers
  that rounds: by ``floor_divide``; torch's exporter divides them in float32.
- ``x & c``, ``x | c``, ``x ^ c`` and ``~x`` of integers before operator set 18, with a number c:
  each run of ones of c, from bit a to bit b, takes ⌊x / 2ᵃ⌋ mod 2ᵇ⁻ᵃ⁺¹ times 2ᵃ, and
  x | c = x + c − (x & c).
- ``adaptive_max_pool`` into equal windows: a max pool of that kernel and stride, indices included.
  Otherwise window i of n along an axis of size s has the places ⌊i·s / n⌋ to ⌈(i + 1)·s / n⌉ − 1.
  They are gathered, the last place again in shorter windows, and a ReduceMax takes the largest.
- ``avg_pool`` with a divisor of its own: the mean, zeros of the padding included, times the
  kernel's size, over the divisor. torch's exporter leaves the divisor out.
- ``copysign``, ``rrelu`` in evaluation (a LeakyReLU of the mean slope): by their formulas.
- ``fold`` (col2im): a permutation where patches lie side by side, else a transposed convolution
  with kernels of zeros and a one. Col2Im is of operator set 18, and TensorRT has none.
- ``index_add``, ``index_put`` and ``scatter_reduce`` that sum or take means, in place too: a
  ``scatter_add``, whose order no runtime changes; for engines whose scatters do not sum, products
  with a matrix of zeros and ones (`_scatter_sums`).
- ``hstack``, ``vstack``, ``dstack`` and ``column_stack``: a ``cat`` of the tensors after
  `torch.atleast_1d` or its 2d and 3d forms. torch's exporter asks for the rank of each in the file.
- ``hypot``, ``fmax`` and ``fmin``, ``cross``: by their formulas; ranks, places in a list, products
  so far and distances: `_axis_forms`.
- ``inverse`` of up to four rows, and ``linalg.solve`` for matrices by it: camera geometry inverts
  intrinsics and poses. A⁻¹ = adj(A) / det(A), adj(A)ᵢⱼ = (−1)ⁱ⁺ʲ det(A without row j and column i),
  with determinants expanded along their first row (Laplace): as exact as an LU decomposition where
  A is well-conditioned. Of a singular matrix torch ends with an error, and a file divides by zero.
- ``max`` and ``min`` of masks: those of integers. ReduceMax takes masks from operator set 20 on.
- ``amax`` and ``amin`` of a whole tensor: of the axes by number. ``aminmax``: by these two.
- ``repeat_interleave(…, output_size=n)``: without the size, which torch's exporter does not take.
- ``segment_reduce`` along the first axis, between offsets: a scatter to the numbers of the
  segments, the running sum of ones at their starts.
- ``topk(sorted=False)``: in order. torch leaves the order open, and each runtime takes another.
- ``view(dtype)`` of integers: bytes by division, integers by the sum of bytes · 256ⁱ, the least
  byte first; the sign is the last byte's.
- ``nan_to_num(x)``: values not equal to themselves are replaced, the rest is clipped.

Further operators that operator set 11 lacks: `_old_set_forms`. Fourier transforms: `_fourier`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from bevquant_export.floats._fourier import FOURIER
from bevquant_export.floats._old_set_forms import (
    AXIS_FORMS,
    FIRST_GRID_SAMPLE,
    FIRST_VOLUME_SAMPLE,
    GRID_SAMPLES,
    OLD_SET_FORMS,
    VOLUME_SAMPLES,
)
from bevquant_export.floats._scatter_sums import ORDERED_SUMS, SCATTER_SUMS
from bevquant_graph import ALIASES, FunctionCalls

_FIRST_EINSUM = 12  # operator set
_FIRST_BITWISE = 18
_MAX_POOL = torch.ops.aten
_LARGEST_INVERSE = 4  # rows; a determinant of five has 120 products


def plain_forms(opset: int, scatter_sums: bool = True) -> FunctionCalls:
    """Context in which the operators of the module's docstring take these forms."""
    forms: dict[str, Callable[..., Tensor | None]] = {
        "atan2": _atan2, "nan_to_num": _nan_to_num,
        "argsort": lambda *args, **kwargs: _sort(*args, **kwargs)[1], "sort": _stable_sort,
        "col2im": _fold, "linalg_inv": _inverse, "linalg_solve": _solve,
        "cross": _cross, "linalg_cross": lambda a, b, *, dim=-1: _cross(a, b, dim), "hypot": _hypot,
        "fmax": partial(_known_of, torch.maximum), "fmin": partial(_known_of, torch.minimum),
        "adaptive_max_pool1d": partial(_adaptive_max_pool, _MAX_POOL.max_pool1d_with_indices),
        "adaptive_max_pool2d": partial(_adaptive_max_pool, _MAX_POOL.max_pool2d_with_indices),
        "adaptive_max_pool3d": partial(_adaptive_max_pool, _MAX_POOL.max_pool3d_with_indices),
        "avg_pool2d": partial(_avg_pool, torch.nn.functional.avg_pool2d, 2),
        "avg_pool3d": partial(_avg_pool, torch.nn.functional.avg_pool3d, 3),
        "max": partial(_of_flags, torch.max), "min": partial(_of_flags, torch.min),
        "amax": partial(_extreme, torch.amax), "amin": partial(_extreme, torch.amin),
        "aminmax": _extremes, "topk": _topk, "repeat_interleave": _repeated,
        "copysign": _copysign, "rrelu": _rrelu, "reshape": _bits, "segment_reduce": _segments,
        **_QUOTIENTS, **_STACKS, **AXIS_FORMS, **FOURIER,
    }  # fmt: skip
    sums = ORDERED_SUMS if scatter_sums else SCATTER_SUMS
    in_place = {f"{name}_": form for name, form in sums.items()}
    forms |= sums
    if opset < FIRST_GRID_SAMPLE:
        forms |= GRID_SAMPLES
    elif opset < FIRST_VOLUME_SAMPLE:
        forms |= VOLUME_SAMPLES
    if opset < _FIRST_BITWISE:
        forms |= _BITWISE
    if opset < _FIRST_EINSUM:
        whole = {name: partial(form, whole=True) for name, form in _QUOTIENTS.items()}
        forms |= OLD_SET_FORMS | whole

    def call(func: Any, args: Any, kwargs: Any) -> Any:
        name = _name(func)
        form = forms.get(name) or in_place.get(name)
        made = None if form is None else form(*args, **kwargs)
        if made is not None and name in in_place:
            made = args[0].copy_(made)
        return func(*args, **kwargs) if made is None else made

    return FunctionCalls(call)


def _name(func: Any) -> str:
    operator = isinstance(func, torch._ops.OpOverload)
    name = func._schema.name.removeprefix("aten::") if operator else getattr(func, "__name__", "")
    return ALIASES.get(name, name)


def _atan2(y: Tensor, x: Tensor) -> Tensor:
    if not y.is_floating_point():
        y, x = y.float(), x.float()
    up, along = y.abs(), x.abs()
    most = torch.maximum(up, along)
    angle = torch.atan(torch.minimum(up, along) / torch.where(most == 0, 1.0, most))
    angle = torch.where(up > along, math.pi / 2 - angle, angle)
    angle = torch.where(_negative(x), math.pi - angle, angle)
    return torch.where(_negative(y), -angle, angle)


def _negative(x: Tensor) -> Tensor:
    return (x < 0) | (x.reciprocal() < 0)


def _cross(a: Tensor, b: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:  # the first axis of size 3
        dim = [int(size) for size in a.shape].index(3)
    return a.roll(-1, dim) * b.roll(-2, dim) - a.roll(-2, dim) * b.roll(-1, dim)


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    low, high = torch.minimum(x.abs(), y.abs()), torch.maximum(x.abs(), y.abs())
    return high * torch.sqrt(1 + (low / torch.where(high > 0, high, torch.ones_like(high))) ** 2)


def _known_of(choose: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The one of two that is a number, or the one that is chosen."""
    return torch.where(x != x, y, torch.where(y != y, x, choose(x, y)))


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return None if sorted else torch.topk(x, k, dim, largest)


def _repeated(
    x: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Tensor | None:
    if output_size is None:
        return None
    return torch.repeat_interleave(x) if repeats is None else x.repeat_interleave(repeats, dim)


def _copysign(x: Tensor, y: Any) -> Tensor:
    size = x.abs()
    if not isinstance(y, Tensor):
        return size * math.copysign(1.0, y)
    return torch.where(_negative(y), -size, size)


def _rrelu(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *more: Any
) -> Tensor | None:
    return None if training else torch.nn.functional.leaky_relu(x, (lower + upper) / 2)


def _adaptive_max_pool(pool: Callable[..., Any], x: Tensor, output_size: Any) -> Any:
    if isinstance(output_size, int):
        output_size = [output_size]
    sizes = x.shape[x.dim() - len(output_size) :]
    if any(size % made for size, made in zip(sizes, output_size, strict=True)):
        return _window_maxima(x, sizes, output_size)
    kernel = [size // made for size, made in zip(sizes, output_size, strict=True)]
    return pool(x, kernel, kernel)


def _window_maxima(x: Tensor, sizes: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Largest value of each window, and its place in the map, numbered row by row."""
    rank, first = len(counts), x.dim() - len(counts)
    places = torch.zeros((), dtype=torch.int64)
    for axis, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        windows = [range(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
        width = max(map(len, windows))
        index = torch.tensor([[w[min(k, len(w) - 1)] for k in range(width)] for w in windows])
        at = first + 2 * axis
        x = x.index_select(at, index.flatten()).unflatten(at, (count, width))
        places = places[..., None, None] * size + index

    def by_window(values: Tensor, at: int) -> Tensor:
        last = values.dim()
        order = [*range(at), *range(at, last, 2), *range(at + 1, last, 2)]
        return values.permute(order).flatten(at + rank)

    x, places = by_window(x, first), by_window(places, 0)
    best = x.argmax(-1, keepdim=True)
    return x.amax(-1), places.expand(x.shape).gather(-1, best).squeeze(-1)


def _avg_pool(
    pool: Callable[..., Tensor],
    axes: int,
    x: Tensor,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor | None:
    if divisor_override is None or ceil_mode:  # cut windows count their values
        return None
    sizes = [kernel] * axes if isinstance(kernel, int) else list(kernel)
    values = math.prod(sizes * (axes // len(sizes)))
    return pool(x, kernel, stride or None, padding) * (values / divisor_override)


def _stacked(raised: Callable[..., Any], axis: int, tensors: Sequence[Tensor]) -> Tensor:
    parts = [raised(tensor) for tensor in tensors]
    return torch.cat(parts, min(axis, parts[0].dim() - 1))


_STACKS = {
    "hstack": partial(_stacked, torch.atleast_1d, 1),
    "vstack": partial(_stacked, torch.atleast_2d, 0),
    "dstack": partial(_stacked, torch.atleast_3d, 2),
    "column_stack": partial(_stacked, lambda x: x.reshape(-1, 1) if x.dim() < 2 else x, 1),
}


def _of_flags(reduce: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if x.dtype != torch.bool:
        return None
    made = reduce(x.int(), *args, **kwargs)
    return made.bool() if isinstance(made, Tensor) else (made[0].bool(), made[1])


def _extreme(
    reduce: Callable[..., Tensor], x: Tensor, dim: Any = (), keepdim: bool = False
) -> Tensor | None:
    axes = dim if isinstance(dim, int) or dim else tuple(range(x.dim()))
    made: Tensor | None = _of_flags(reduce, x, axes, keepdim)
    return reduce(x, axes, keepdim) if made is None and axes is not dim else made


def _extremes(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    axes = () if dim is None else dim
    return x.amin(axes, keepdim), x.amax(axes, keepdim)


def _segments(
    x: Tensor, reduce: str, *, offsets: Tensor | None = None, axis: int = 0, initial: Any = None,
    **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    numbers = {"sum": 0.0, "mean": 0.0, "max": -math.inf, "min": math.inf}
    if offsets is None or offsets.dim() != 1 or axis or initial is not None:
        return None
    starts = offsets.new_zeros(x.shape[0] + 1)
    starts = starts.scatter_add(0, offsets[1:], torch.ones_like(offsets[1:]))
    segment = starts[:-1].cumsum(0)
    index = segment.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    made = x.new_full((offsets.shape[0] - 1, *x.shape[1:]), numbers[reduce])
    if reduce in ("max", "min"):
        return made.scatter_reduce(0, index, x, f"a{reduce}")
    made = made.scatter_add(0, index, x)
    if reduce == "sum":
        return made
    counts: Tensor = offsets.diff().to(x.dtype)
    return made / counts.view(-1, *[1] * (x.dim() - 1))


def _bits(x: Tensor, *shape: Any, dtype: Any = None) -> Tensor | None:
    dtype = shape[0] if shape and isinstance(shape[0], torch.dtype) else dtype
    if dtype is None or any(t.is_floating_point or t.is_complex for t in (x.dtype, dtype)):
        return None
    parts = x.long()[..., None] // 256 ** torch.arange(x.itemsize) % 256
    parts = parts.flatten(-2).unflatten(-1, (-1, dtype.itemsize))
    made: Tensor = parts[..., -1]
    if dtype.is_signed:
        made = torch.where(made > 127, made - 256, made)
    for place in range(dtype.itemsize - 2, -1, -1):  # runtimes add int64 in float64 in a ReduceSum
        made = made * 256 + parts[..., place]
    return made.to(dtype)


def _nan_to_num(
    x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor | None:
    if not x.is_floating_point():
        return x
    limits = torch.finfo(x.dtype)
    if posinf is not None or neginf is not None:
        return None
    return torch.where(x == x, x, nan or 0.0).clamp(limits.min, limits.max)


def _inverse(*args: Any, **kwargs: Any) -> Tensor | None:
    return None if kwargs or not _is_small(args) else _adjugate_inverse(args[0])


def _solve(*args: Any, left: bool = True, **kwargs: Any) -> Tensor | None:
    if kwargs or not _is_small(args):
        return None
    a, b = args
    if not isinstance(b, Tensor) or b.dim() != a.dim():
        return None
    inverted = _adjugate_inverse(a)
    return inverted @ b if left else b @ inverted


def _is_small(args: tuple[Any, ...]) -> bool:
    a = args[0] if args else None
    return isinstance(a, Tensor) and 1 <= a.shape[-1] <= _LARGEST_INVERSE


def _adjugate_inverse(a: Tensor) -> Tensor:
    every = tuple(range(a.shape[-1]))

    @cache
    def determinant(rows: tuple[int, ...], columns: tuple[int, ...]) -> Tensor:
        first, rest = rows[0], rows[1:]
        total = None
        for place, column in enumerate(columns):
            entry = a[..., first, column]
            if not rest:
                return entry
            product = entry * determinant(rest, _without(columns, column))
            if total is None:
                total = product
            else:
                total = total - product if place % 2 else total + product
        assert total is not None
        return total

    def adjugate(i: int, j: int) -> Tensor:
        if len(every) == 1:
            return torch.ones_like(a[..., 0, 0])
        minor = determinant(_without(every, j), _without(every, i))
        return -minor if (i + j) % 2 else minor

    lines = [torch.stack([adjugate(i, j) for j in every], -1) for i in every]
    return torch.stack(lines, -2) / determinant(every, every)[..., None, None]


def _without(numbers: tuple[int, ...], one: int) -> tuple[int, ...]:
    return tuple(number for number in numbers if number != one)


def _sort(x: Tensor, dim: int = -1, descending: bool = False, *, stable: Any = None) -> Any:
    return torch.sort(x, dim, descending)


def _stable_sort(x: Tensor, *args: Any, stable: bool | None = None, **kwargs: Any) -> Any:
    return None if stable is None else _sort(x, *args, **kwargs)


def _fold(
    x: Tensor,
    output_size: Sequence[Any],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """Patches ``[batch, channels · kernel, places]`` put back where they were, and added."""
    batched = x if x.dim() == 3 else x[None]
    (high, wide), shape = kernel_size, list(zip(output_size, kernel_size, strict=True))
    channels = batched.shape[1] // (high * wide)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel_size, strict=True)]
    room = [size + 2 * p - span for size, p, span in zip(output_size, padding, spans, strict=True)]
    rows, columns = (space // step + 1 for space, step in zip(room, stride, strict=True))
    apart = list(stride) == list(kernel_size) and not any(padding) and set(dilation) == {1}
    if apart and not any(size % kernel for size, kernel in shape):
        parts = batched.reshape(-1, channels, high, wide, rows, columns)
        made = parts.permute(0, 1, 4, 2, 5, 3).reshape(-1, channels, *output_size)
    else:
        weight = torch.eye(high * wide, dtype=x.dtype, device=x.device)
        made = torch.nn.functional.conv_transpose2d(
            batched.reshape(-1, channels * high * wide, rows, columns),
            weight.reshape(high * wide, 1, high, wide).repeat(channels, 1, 1, 1),
            None, tuple(stride), tuple(padding),
            tuple(space % step for space, step in zip(room, stride, strict=True)),
            channels, tuple(dilation),
        )  # fmt: skip
    return made if x.dim() == 3 else made[0]


def _remainder(x: Any, y: Any, *, whole: bool = False) -> Tensor | None:
    found = _divided(x, y, whole)
    if found is None:
        return None
    _, left = found
    return torch.where(_opposite(left, y), left + y, left)


def _floor_divide(x: Any, y: Any, *, whole: bool = False) -> Tensor | None:
    found = _divided(x, y, whole)
    if found is None:
        return None
    quotient, left = found
    return torch.where(_opposite(left, y), quotient - 1, quotient)


def _div(x: Any, y: Any, *, rounding_mode: str | None = None, whole: bool = False) -> Tensor | None:
    if not whole and rounding_mode is not None and _are_whole(x, y):
        quotient: Tensor = torch.floor_divide(x, y)
        inexact: Tensor = (quotient < 0) & (quotient * y != x)
        return quotient + inexact if rounding_mode == "trunc" else quotient
    return _floor_divide(x, y, whole=whole) if rounding_mode == "floor" else None


def _are_whole(x: Any, y: Any) -> bool:
    """Whether an integer tensor is divided by integers."""
    if not isinstance(x, Tensor) or x.is_floating_point():
        return False
    return isinstance(y, int) or (isinstance(y, Tensor) and not y.is_floating_point())


_QUOTIENTS: dict[str, Callable[..., Tensor | None]] = {
    "remainder": _remainder, "floor_divide": _floor_divide, "div": _div,
}  # fmt: skip


def _and(x: Any, mask: Any) -> Tensor | None:
    if not isinstance(x, Tensor) or x.is_floating_point() or not x.dtype.is_signed:
        return None  # masks of truth values too
    if type(mask) is not int:
        return None
    if mask < 0:
        rest = _and(x, ~mask)
        return None if rest is None else x - rest
    if mask > torch.iinfo(x.dtype).max // 2:
        return None
    total, low = torch.zeros_like(x), 0
    while mask >> low:
        ones = (~(mask >> low) & (mask >> low) + 1).bit_length() - 1
        if ones:
            part = torch.floor_divide(x, 2**low) if low else x
            total = total + torch.remainder(part, 2**ones) * 2**low
        low += max(ones, 1)
    return total


def _or(x: Any, mask: Any) -> Tensor | None:
    both = _and(x, mask)
    return None if both is None else x + mask - both


def _xor(x: Any, mask: Any) -> Tensor | None:
    both = _and(x, mask)
    return None if both is None else x + mask - both * 2


_BITWISE: dict[str, Callable[..., Tensor | None]] = {
    "bitwise_and": _and, "bitwise_or": _or, "bitwise_xor": _xor,
    "bitwise_not": lambda x: -1 - x if x.dtype.is_signed else None,
}  # fmt: skip


def _opposite(left: Tensor, y: Any) -> Tensor:
    """Whether the signs differ; a product of small numbers would be 0."""
    opposite: Tensor = (left < 0) != (y < 0)
    return opposite & (left != 0)


def _divided(x: Any, y: Any, whole: bool) -> tuple[Tensor, Tensor] | None:
    """Quotients rounded towards zero, with remainders.

    None unless the operands are tensors of floats, or with `whole` of whole numbers.
    """
    if not isinstance(x, Tensor):
        return None
    if x.is_floating_point():
        left = torch.fmod(x, y)
        return ((x - left) / y).round(), left
    if not whole or not _are_whole(x, y):
        return None
    quotient = torch.div(x, y, rounding_mode="trunc")
    return quotient, x - quotient * y
