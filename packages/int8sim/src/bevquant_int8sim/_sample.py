r"""Sampling of integers at real positions: `grid_sample`, deformable attention and convolution.

Positions are floats and have no range: they are never quantized with the values. A bilinear sample
is a sum over the four pixels around a position, in whole numbers:

.. math:: u = \operatorname{round}(2^{12} p), \quad
          a = \sum_k q_k w_{k,y} w_{k,x}, \quad
          w_{k,i} \in \{2^{12} - (u_i \bmod 2^{12}),\; u_i \bmod 2^{12}\}

p is the position in pixels, taken in float64 and rounded half to even to 12 fraction bits. The
weights of a sample add up to 2²⁴ exactly, so a of int8 never leaves int32. In a volume both planes'
sums are rounded half to even to 12 fraction bits before the third axis. The caller rescales a once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bevquant_graph import deformable_attention
from bevquant_int8sim._backends import compiled_module
from bevquant_int8sim._conv import int8_conv2d
from bevquant_int8sim._matmul import gathered
from bevquant_int8sim._quantize import requantize
from bevquant_int8sim._scales import AccumulatorOverflowError, check_integer_tensor
from bevquant_sparse.runtime.eager import eager

MODES = ("bilinear", "nearest")
SAMPLES = ("grid_sample", "deformable_attention")
"""Operations of a program's steps."""
PADDINGS = ("zeros", "border", "reflection")
_AT_ONCE = 1 << 22  # sums
_BITS = 12  # fraction bits of a position
_WORD = 16  # bits of a sample between its two sums
_WEIGHT_BITS = 14  # fraction bits of the weights of samples
_LARGEST_WEIGHTS = 2**_WORD - 1  # |samples| <= 2¹⁵: a weighted sum stays inside int32


@eager
def int8_grid_sample(
    x: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
    *,
    multiplier: float = 1.0,
    rounding: str = "half_even",
    arithmetic: str = "float64",
    name: str = "int8_grid_sample",
) -> Tensor:
    r"""Sample integers at a grid of positions, as ``torch.nn.functional.grid_sample``.

    ``"bilinear"``: round(a · M / 2²⁴) with the sums a of this module's formula. ``"nearest"``: the
    pixel that torch takes, times M.

    Positions in pixels: ((g + 1)·n − 1)/2, with `align_corners` (g + 1)/2·(n − 1). ``"zeros"``:
    pixels outside count 0. ``"border"`` holds positions inside, ``"reflection"`` folds them back.

    Args:
        x: int8 ``[batch, channels, height, width]``, or with a depth in front of the height.
        grid: Float ``[batch, *outputs, 2 or 3]``, x first, −1 to 1 inside.
        mode: ``"bilinear"`` or ``"nearest"``.
        padding_mode: ``"zeros"``, ``"border"`` or ``"reflection"``.
        align_corners: −1 and 1 are the outermost pixels' centres, else their outer edges.
        multiplier: M = s_x / s_y.
        rounding: ``"half_even"``, ``"half_up"`` or ``"half_away"`` (see `requantize`).
        arithmetic: ``"float64"`` or ``"fixed_point"`` (see `requantize`).
        name: The layer that a message names.

    Returns:
        int8 ``[batch, channels, *outputs]``.

    Raises:
        TypeError: `x` is not int8, or the grid is no float tensor.
        ValueError: A setting does not fit, or a position is NaN or infinite.

    Example:
        >>> x = torch.tensor([[[[0, 100]]]], dtype=torch.int8)
        >>> grid = torch.tensor([[[[-0.5, 0.0], [0.0, 0.0], [1.0, 0.0]]]])
        >>> int8_grid_sample(x, grid).tolist(), int8_grid_sample(x, grid, "nearest").tolist()
        ([[[[0, 50, 50]]]], [[[[0, 0, 0]]]])
    """
    sums, bits = grid_sums(x, grid, mode, padding_mode, align_corners, name=name)
    factor = multiplier / 2**bits
    return requantize(sums, factor, rounding=rounding, arithmetic=arithmetic, name=name)


def grid_sums(
    x: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool, *, name: str
) -> tuple[Tensor, int]:
    """Sums int32 of `int8_grid_sample`, and how many of their bits are a fraction."""
    check_integer_tensor(name, "x", x, (torch.int8,))
    _check_positions(name, "grid", grid)
    sizes = x.shape[2:]
    fits = grid.dim() == x.dim() and len(grid) == len(x) and grid.shape[-1] == len(sizes)
    if len(sizes) not in (2, 3) or not fits or 0 in sizes:
        raise ValueError(
            f"{name}: expected [batch, channels, height, width] and a grid [batch, *outputs, 2], "
            f"or with a depth and 3, got {tuple(x.shape)} and {tuple(grid.shape)}"
        )
    if mode not in MODES or padding_mode not in PADDINGS:
        raise ValueError(
            f"{name}: mode={mode!r}, padding_mode={padding_mode!r}: expected 'bilinear' or "
            f"'nearest', and one of {', '.join(map(repr, PADDINGS))}"
        )
    if mode == "nearest":
        # torch's own choice: half of a pixel falls to another side in other arithmetic.
        exact = grid if grid.dtype == torch.float64 else grid.float()
        picked = functional.grid_sample(
            x.to(exact.dtype), exact, mode, padding_mode, bool(align_corners)
        )
        return picked.to(torch.int32), 0
    outputs, positions = grid.shape[1:-1], grid.double().flatten(1, -2)
    at = [
        _inside(positions[..., axis], size, padding_mode, align_corners).flatten()
        for axis, size in enumerate(reversed(sizes))
    ][::-1]
    rows = x.flatten(2).transpose(1, 2).reshape(-1, x.shape[1])
    frames = torch.arange(len(x), device=x.device) * math.prod(sizes)
    first = frames.repeat_interleave(math.prod(outputs))
    steps = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    sums = _sums(rows.contiguous(), first, at, sizes, steps)
    return sums.view(len(x), *outputs, x.shape[1]).movedim(-1, 1), 2 * _BITS


@eager
def int8_deformable_attention(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    multiplier: float = 1.0,
    rounding: str = "half_even",
    arithmetic: str = "float64",
    name: str = "int8_deformable_attention",
) -> Tensor:
    r"""Weighted sums of bilinear samples of several maps (Zhu et al. 2021, equation 3).

    .. math:: y = \operatorname{round}\Bigl(\frac{M}{2^{22}} \sum_{l, p}
              \operatorname{round}(2^{14} A_{l, p})
              \operatorname{round}\bigl(a_{l, p} / 2^{16}\bigr)\Bigr)

    a are the sums of this module's formula in 24 fraction bits, at the pixels x·w − ½, y·h − ½ with
    zeros outside. A sample keeps 8 of the bits, a weight has 14; both are rounded half to even.

    Args:
        value: int8 ``[batch, Σ height·width, heads, depth]``.
        value_spatial_shapes: Height and width of each level, integers ``[levels, 2]``.
        value_level_start_index: First row of each level, integers ``[levels]``.
        sampling_locations: x, y in 0 … 1, float ``[batch, queries, heads, levels, points, 2]``.
        attention_weights: Float ``[batch, queries, heads, levels, points]``.
        multiplier: M = s_x / s_y.
        rounding: Of the result (see `requantize`).
        arithmetic: ``"float64"`` or ``"fixed_point"`` (see `requantize`).
        name: The layer that a message names.

    Returns:
        int8 ``[batch, queries, heads · depth]``.

    Raises:
        TypeError: `value` is not int8, or positions or weights are no floats.
        ValueError: Shapes do not fit, or a position or weight is NaN or infinite.
        AccumulatorOverflowError: The weights of a query add up to 4 or more in magnitude.

    Example:
        >>> value = torch.tensor([0, 100], dtype=torch.int8).view(1, 2, 1, 1)
        >>> middle = torch.full((1, 1, 1, 1, 1, 2), 0.5)
        >>> shapes, starts = torch.tensor([[1, 2]]), torch.tensor([0])
        >>> weights = torch.full((1, 1, 1, 1, 1), 0.5)
        >>> int8_deformable_attention(value, shapes, starts, middle, weights).tolist()
        [[[25]]]
    """
    sums, bits = attention_sums(
        value, value_spatial_shapes, value_level_start_index, sampling_locations,
        attention_weights, name=name,
    )  # fmt: skip
    factor = multiplier / 2**bits
    return requantize(sums, factor, rounding=rounding, arithmetic=arithmetic, name=name)


def attention_sums(
    value: Tensor, shapes: Tensor, starts: Tensor, places: Tensor, weights: Tensor, *, name: str
) -> tuple[Tensor, int]:
    """Sums int32 of `int8_deformable_attention`, and how many of their bits are a fraction."""
    check_integer_tensor(name, "value", value, (torch.int8,))
    _check_positions(name, "sampling_locations", places)
    sizes = [(int(h), int(w)) for h, w in shapes.tolist()]
    batch, rows, heads, depth = value.shape if value.dim() == 4 else (0, 0, 0, 0)
    queries, points = (places.shape[1], places.shape[4]) if places.dim() == 6 else (0, 0)
    levels = (batch, queries, heads, len(sizes), points)
    ends = [s + h * w for s, (h, w) in zip(starts.tolist(), sizes, strict=True)]
    if places.shape != (*levels, 2) or weights.shape != levels or max(ends, default=0) > rows:
        raise ValueError(
            f"{name}: expected value [batch, Σ height·width, heads, depth], sampling_locations "
            "[batch, queries, heads, levels, points, 2], attention_weights without the last axis, "
            f"got {tuple(value.shape)}, {tuple(places.shape)}, {tuple(weights.shape)} and levels "
            f"{sizes}"
        )
    fixed = _fixed_weights(weights, (3, 4), name)
    frame = torch.arange(batch, device=value.device).view(-1, 1, 1) * (rows * heads)
    head = frame + torch.arange(heads, device=value.device)
    flat = value.reshape(-1, depth).contiguous()
    total = torch.zeros(batch * queries * heads, depth, dtype=torch.int32, device=value.device)
    for level, (start, (h, w)) in enumerate(zip(starts.tolist(), sizes, strict=True)):
        first = (head + start * heads).expand(-1, queries, -1).flatten()
        for point in range(points):
            place = places[:, :, :, level, point].double()
            # Further out there is no pixel either.
            at = [(place[..., 1 - axis] * size - 0.5).clamp(-1, size).flatten()
                  for axis, size in enumerate((h, w))]  # fmt: skip
            weight = fixed[:, :, :, level, point].reshape(-1)
            _add_samples(total, weight, flat, first, at, (h, w), (w * heads, heads))
    return total.view(batch, queries, heads * depth), 2 * _BITS - _WORD + _WEIGHT_BITS


@eager
def int8_deform_conv2d(
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    multiplier: Tensor | float,
    rounding: str = "half_even",
    relu: bool = False,
    name: str = "int8_deform_conv2d",
) -> Tensor:
    r"""Deformable convolution (Dai et al. 2017; with a mask Zhu et al. 2019), as torchvision's.

    Tap k of output p is sampled at p + p_k + Δ_k(p), with zeros outside. A sample has 8 fraction
    bits, the mask 14; their product (without a mask the sum of 24 fraction bits) is rounded half to
    even to int8 in the scale of `x`. Then an integer convolution follows.

    Args:
        x: int8 ``[batch, channels, height, width]``.
        weight: int8 ``[out, channels / groups, kernel height, kernel width]``.
        offset: Float ``[batch, offset groups · taps · 2, *outputs]``, y before x, in pixels.
        mask: Float ``[batch, offset groups · taps, *outputs]``; None for ones.
        bias: int32 ``[out]``, in units of the accumulator.
        stride: Along y and x.
        padding: Zeros on both sides.
        dilation: Distance of the taps.
        multiplier: s_x·s_w / s_y, one or one per output channel.
        rounding: Of the result (see `requantize`).
        relu: Clamp at 0 from below.
        name: The layer that a message names.

    Returns:
        int8 ``[batch, out, *outputs]``.

    Raises:
        TypeError: `x` is not int8, or offsets are no floats.
        ValueError: Shapes do not fit, or an offset or mask value is NaN or infinite.
        AccumulatorOverflowError: A mask value is 4 or more in magnitude, or a sum leaves int32.

    Example:
        >>> x, weight = torch.full((1, 1, 1, 2), 100, dtype=torch.int8), torch.ones(1, 1, 1, 1)
        >>> right = torch.tensor([0.0, 0.5]).view(1, 2, 1, 1).expand(1, 2, 1, 2)
        >>> int8_deform_conv2d(x, weight.to(torch.int8), right, multiplier=1.0).tolist()
        [[[[100, 50]]]]
    """
    check_integer_tensor(name, "x", x, (torch.int8,))
    _check_positions(name, "offset", offset)
    batch, channels, height, width = x.shape
    kernel = weight.shape[2:]
    taps = math.prod(kernel)
    steps, pads, apart = (_pair(value) for value in (stride, padding, dilation))
    sides = zip((height, width), kernel, steps, pads, apart, strict=True)
    outputs = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)
    sharing = offset.shape[1] // (2 * taps)
    if offset.shape != (batch, sharing * taps * 2, *outputs) or not sharing or channels % sharing:
        raise ValueError(
            f"{name}: expected offset [batch, offset groups · {taps} · 2, {outputs[0]}, "
            f"{outputs[1]}], got {tuple(offset.shape)} for x {tuple(x.shape)}"
        )
    shift = offset.double().view(batch, sharing, taps, 2, *outputs)
    at = []
    for axis, size in enumerate((height, width)):
        tap = torch.arange(taps, device=x.device)
        tap = (tap // kernel[1] if axis == 0 else tap % kernel[1]) * apart[axis] - pads[axis]
        line = torch.arange(outputs[axis], device=x.device) * steps[axis]
        place = tap.view(-1, 1, 1) + (line.view(-1, 1) if axis == 0 else line)
        at.append((shift[:, :, :, axis] + place).clamp(-1, size).flatten())
    rows = x.reshape(batch * sharing, -1, height * width).transpose(1, 2)
    rows = rows.reshape(-1, channels // sharing).contiguous()
    first = torch.arange(batch * sharing, device=x.device) * (height * width)
    sums = _sums(
        rows, first.repeat_interleave(taps * math.prod(outputs)), at, (height, width), (width, 1),
    )  # fmt: skip
    columns = _masked(sums, mask, (batch, sharing * taps, *outputs), name).to(torch.int8)
    columns = columns.view(batch, sharing, taps, *outputs, -1).movedim(-1, 2)
    return int8_conv2d(
        columns.reshape(batch, channels * taps, *outputs), weight.flatten(1)[..., None, None], bias,
        groups=channels // weight.shape[1], multiplier=multiplier, rounding=rounding, relu=relu,
        name=name,
    )  # fmt: skip


def _masked(sums: Tensor, mask: Tensor | None, shape: tuple[int, ...], name: str) -> Tensor:
    """Samples times the mask, rounded to integers of the sampled map's scale."""
    if mask is None:
        return _shifted(sums, 2 * _BITS)
    if mask.shape != shape:
        raise ValueError(f"{name}: expected mask {shape}, got {tuple(mask.shape)}")
    products = _shifted(sums, _WORD) * _fixed_weights(mask, (), name).view(-1, 1)
    return _shifted(products, 2 * _BITS - _WORD + _WEIGHT_BITS).clamp(-128, 127)


def sampling_error(op: str, args: Sequence[Tensor], mode: str = "bilinear") -> float:
    """Largest difference of a sample from real arithmetic, in steps of the sampled integers.

    A position is off by 2⁻¹³ pixels, and by size·2⁻²² in float32. Each axis turns that into as many
    differences of pixels. A volume adds the rounding of its planes (2⁻¹³), attention those of
    samples (2⁻⁹) and weights (2⁻¹⁵ each).
    """
    x = args[0]
    if op == "grid_sample":
        if mode == "nearest":
            return 0.0
        sizes = list(x.shape[2:])
    else:
        sizes = [int(args[1].max())] * 2
    low, high = (int(x.min()), int(x.max())) if x.numel() else (0, 0)
    spread = max(high, 0) - min(low, 0)
    half = 2.0 ** -(_BITS + 1)
    error = sum(half + size * 2.0**-22 for size in sizes) * spread
    if op == "grid_sample":
        return error + half * (len(sizes) > 2)
    weights = args[4]
    most = float(weights.abs().sum((-2, -1)).max()) if weights.numel() else 0.0
    each = weights.shape[-1] * weights.shape[-2] * 2.0 ** -(_WEIGHT_BITS + 1)
    return most * (error + 2.0**-9) + each * spread


def exact_samples(op: str, args: Sequence[Tensor], settings: Mapping[str, Any]) -> Tensor:
    """The same samples in float64, in steps of the sampled integers."""
    x, *places = (t.double() if t.is_floating_point() or t is args[0] else t for t in args)
    if op == "grid_sample":
        return functional.grid_sample(x, places[0], **settings)
    return deformable_attention(x, *places)


def _add_samples(
    total: Tensor, weights: Tensor, rows: Tensor, first: Tensor, at: Sequence[Tensor],
    sizes: Sequence[int], steps: Sequence[int],
) -> None:  # fmt: skip
    """Add each position's sum of `_sums` times its weight.

    It is rounded to 16 bits first, so that sums of these stay inside int32 (`_LARGEST_WEIGHTS`).
    """
    if (fast := _compiled(total)) is not None:
        fast.sample(rows, first, [*map(_fixed, at)], sizes, steps, total, weights)
    else:
        total += _shifted(_sums(rows, first, at, sizes, steps), _WORD) * weights[:, None]


def _compiled(made: Tensor) -> Any:
    """The compiled kernel's module, if there is one and `made` is large enough for it."""
    return compiled_module("sample", made.numel()) if made.device.type == "cpu" else None


def _fixed(places: Tensor) -> Tensor:
    """Positions with 12 fraction bits."""
    return torch.round(places * 2**_BITS).to(torch.int32)


def _sums(
    rows: Tensor, first: Tensor, at: Sequence[Tensor], sizes: Sequence[int], steps: Sequence[int]
) -> Tensor:
    """Σ q·w over the pixels around each position, int32 ``[positions, channels]``.

    `first` is the row of each position's first pixel; `at` are positions along each axis, from −1
    to the axis' size, and `steps` the rows from a pixel to the next one along each axis.
    """
    made = torch.empty(len(first), rows.shape[1], dtype=torch.int32, device=rows.device)
    if len(sizes) == 2 and (fast := _compiled(made)) is not None:
        fast.sample(rows, first, [*map(_fixed, at)], sizes, steps, made)
        return made
    few = max(1, _AT_ONCE // max(rows.shape[1], 1))
    for start in range(0, len(first), few):
        part = slice(start, start + few)
        ends = []
        for place, size, step in zip(at, sizes, steps, strict=True):
            fixed = _fixed(place[part]).long()
            low = fixed >> _BITS
            share = fixed - (low << _BITS)
            # A pixel outside of the map is any pixel inside, with weight 0.
            ends.append([
                (pixel.clamp(0, size - 1) * step, weight * ((pixel >= 0) & (pixel < size)))
                for pixel, weight in ((low, 2**_BITS - share), (low + 1, share))
            ])  # fmt: skip
        made[part] = _plane(rows, first[part], *ends[-2:])
        if len(ends) == 3:
            planes = [
                _shifted(_plane(rows, first[part] + depth, *ends[1:]), _BITS) * _column(weight)
                for depth, weight in ends[0]
            ]
            made[part] = planes[0] + planes[1]
    return made


_Ends = list[tuple[Tensor, Tensor]]


def _plane(rows: Tensor, first: Tensor, down: _Ends, across: _Ends) -> Tensor:
    """Σ q·w over four pixels: for both ends of each axis, rows to go and weights."""
    total = torch.zeros(len(first), rows.shape[1], dtype=torch.int32, device=rows.device)
    for (y, top), (x, left) in itertools.product(down, across):
        total += gathered(rows, first + y + x).to(torch.int32) * _column(top * left)
    return total


def _column(weights: Tensor) -> Tensor:
    return weights.to(torch.int32)[:, None]


def _shifted(sums: Tensor, bits: int) -> Tensor:
    """int32 sums without the last `bits` of their fraction, rounded half to even.

    They are at most 2³¹ − 2²⁴, so that adding a half does not overflow.
    """
    made: Tensor = (sums + ((sums >> bits) & 1) + (2 ** (bits - 1) - 1)) >> bits
    return made


def _inside(at: Tensor, size: int, padding: str, corners: bool) -> Tensor:
    """−1 … 1 as pixels; positions beyond the map held where nothing changes, or folded back."""
    at = (at + 1) * ((size - 1) / 2) if corners else ((at + 1) * size - 1) / 2
    if padding == "zeros":
        return at.clamp(-1, size)
    if padding == "reflection":
        low, span = (0.0, size - 1.0) if corners else (-0.5, float(size))
        away = (at - low).abs() % (2 * span) if span else torch.zeros_like(at)
        at = torch.minimum(away, 2 * span - away) + low
    return at.clamp(0, size - 1)


def _fixed_weights(weights: Tensor, axes: tuple[int, ...], name: str) -> Tensor:
    """Weights in 14 fraction bits, int32, unless those of a sum over `axes` are too large."""
    _check_positions(name, "the weights of samples", weights)
    exact = torch.round(weights.double() * 2**_WEIGHT_BITS)
    sums = exact.abs().sum(axes) if axes else exact.abs()
    most = float(sums.max()) if sums.numel() else 0.0
    if most > _LARGEST_WEIGHTS:
        raise AccumulatorOverflowError(
            f"{name}: the weights of one sum of samples add up to {most / 2**_WEIGHT_BITS:.4g} in "
            "magnitude, and 4 or more leave int32; normalise them (a softmax adds up to 1)"
        )
    return exact.to(torch.int32)


def _check_positions(name: str, what: str, positions: Tensor) -> None:
    if not isinstance(positions, Tensor) or not positions.is_floating_point():
        kind = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"{name}: {what}: expected floats, which are not quantized, got {kind}")
    if not bool(positions.isfinite().all()):
        place = tuple((~positions.isfinite()).nonzero()[0].tolist())
        raise ValueError(
            f"{name}: {what} {place} is {float(positions[place])}: expected finite numbers; keep a "
            "division by depth away from 0 (`z.clamp(min=1e-5)`)"
        )


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
