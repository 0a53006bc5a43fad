"""Operators of layers: norms, convolution, pooling, resizing and sampling of grids.

They are rows of `OPERATORS` once this module is imported.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bevquant_export.qdq_reader._operators import numbers, op, tensor

# Norms


@op("LayerNormalization")
def _layer_norm(
    x: Tensor, scale: Any, bias: Any = None, axis: int = -1, epsilon: float = 1e-5, **_: Any
) -> Tensor:
    shape = x.shape[axis % x.dim() :]
    return F.layer_norm(x, shape, tensor(scale), None if bias is None else tensor(bias), epsilon)


@op("RMSNormalization")
def _rms_norm(x: Tensor, scale: Any, axis: int = -1, epsilon: float = 1e-5, **_: Any) -> Tensor:
    return F.rms_norm(x, x.shape[axis % x.dim() :], tensor(scale), epsilon)


@op("GroupNormalization")
def _group_norm(
    x: Tensor, scale: Any, bias: Any, num_groups: int, epsilon: float = 1e-5, **_: Any
) -> Tensor:
    weights = [tensor(v) for v in (scale, bias)]
    # Before opset 21 there is one scale per group.
    gain, shift = (v.repeat_interleave(x.shape[1] // len(v)) for v in weights)
    return F.group_norm(x, num_groups, gain, shift, epsilon)


@op("InstanceNormalization")
def _instance_norm(x: Tensor, scale: Any, bias: Any, epsilon: float = 1e-5) -> Tensor:
    return F.instance_norm(x, weight=tensor(scale), bias=tensor(bias), eps=epsilon)


@op("BatchNormalization")
def _batch_norm(
    x: Tensor, scale: Any, bias: Any, mean: Any, var: Any, epsilon: float = 1e-5,
    training_mode: int = 0, **_: Any,
) -> Tensor:  # fmt: skip
    if training_mode:
        raise ValueError("training_mode=1; expected 0: export the model in evaluation mode")
    scale, bias, mean, var = map(tensor, (scale, bias, mean, var))
    return F.batch_norm(x, mean, var, scale, bias, eps=epsilon)


# Windows


def window_pads(
    sizes: Any, kernel: Any, strides: Any, dilations: Any, auto_pad: str, pads: Any
) -> list[tuple[int, int]]:
    """Padding before and behind each axis of a window's operator."""
    if auto_pad in ("NOTSET", "VALID"):
        half = len(kernel)
        given = list(pads or [0] * 2 * half) if auto_pad == "NOTSET" else [0] * 2 * half
        return list(zip(given[:half], given[half:], strict=True))
    found = []
    for n, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        n = 0 if stride == 1 else int(n)  # of stride 1 the size has no part in it
        total = max((-(-n // stride) - 1) * stride + dilation * (k - 1) + 1 - n, 0)
        found.append((total // 2, total - total // 2))
    return found if auto_pad == "SAME_UPPER" else [pair[::-1] for pair in found]


def padded(x: Tensor, pads: list[tuple[int, int]], value: float = 0.0) -> Tensor:
    """The tensor with its last axes padded."""
    return F.pad(x, [n for pair in reversed(pads) for n in pair], value=value)


@op("MaxPool")
def _max_pool(
    x: Tensor, kernel_shape: Any, strides: Any = None, pads: Any = None, dilations: Any = None,
    ceil_mode: int = 0, auto_pad: str = "NOTSET", storage_order: int = 0,
) -> Tensor:  # fmt: skip
    rank = len(kernel_shape)
    step, spread = list(strides or [1] * rank), list(dilations or [1] * rank)
    ends = window_pads(x.shape[2:], kernel_shape, step, spread, auto_pad, pads)
    if any(a != b or 2 * a > k for (a, b), k in zip(ends, kernel_shape, strict=True)):
        x, ends = padded(x, ends, float(torch.finfo(torch.float32).min)), [(0, 0)] * rank
    pool: Any = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[rank]
    sizes = [a for a, _ in ends]
    made: Tensor = pool(x, list(kernel_shape), step, sizes, spread, bool(ceil_mode))
    return made


@op("AveragePool")
def _average_pool(
    x: Tensor, kernel_shape: Any, strides: Any = None, pads: Any = None, dilations: Any = None,
    ceil_mode: int = 0, count_include_pad: int = 0, auto_pad: str = "NOTSET",
) -> Tensor:  # fmt: skip
    rank = len(kernel_shape)
    step = list(strides or [1] * rank)
    if any(d != 1 for d in dilations or ()):
        raise ValueError(f"dilations={dilations}; expected 1")
    ends = window_pads(x.shape[2:], kernel_shape, step, [1] * rank, auto_pad, pads)
    pool: Any = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[rank]

    def pooled(values: Tensor, sizes: list[int], count: bool) -> Tensor:
        made: Tensor = pool(values, list(kernel_shape), step, sizes, bool(ceil_mode), count)
        return made

    if all(a == b and 2 * a <= k for (a, b), k in zip(ends, kernel_shape, strict=True)):
        return pooled(x, [a for a, _ in ends], bool(count_include_pad))
    if ceil_mode:
        raise ValueError(f"pads={pads} with ceil_mode=1; expected pads alike on both sides")
    sums = pooled(padded(x, ends), [0] * rank, True)
    if count_include_pad:
        return sums
    return sums / pooled(padded(torch.ones_like(x[:1, :1]), ends), [0] * rank, True)


@op("Conv")
def _conv(
    x: Tensor, weight: Any, bias: Any = None, kernel_shape: Any = None, strides: Any = None,
    pads: Any = None, dilations: Any = None, group: int = 1, auto_pad: str = "NOTSET",
) -> Tensor:  # fmt: skip
    weight = tensor(weight)
    rank = weight.dim() - 2
    step, spread = list(strides or [1] * rank), list(dilations or [1] * rank)
    ends = window_pads(x.shape[2:], weight.shape[2:], step, spread, auto_pad, pads)
    convolve: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[rank]
    shift = None if bias is None else tensor(bias)
    made: Tensor = convolve(padded(x, ends), weight, shift, step, 0, spread, group)
    return made


_COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")


@op("Resize")
def _resize(
    x: Tensor, roi: Any = None, scales: Any = None, sizes: Any = None, mode: str = "nearest",
    coordinate_transformation_mode: str = "half_pixel", nearest_mode: str = "round_prefer_floor",
    cubic_coeff_a: float = -0.75, antialias: int = 0, axes: Any = None,
    keep_aspect_ratio_policy: str = "stretch", exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
) -> Tensor:  # fmt: skip
    rank = x.dim() - 2
    along = [a % x.dim() for a in axes] if axes is not None else list(range(x.dim()))
    size: Any = None
    factors: Any = None
    given = numbers(sizes if sizes is not None else scales, "sizes or scales")
    by_axis = dict(zip(along, given, strict=True))
    if sizes is not None:
        size = [int(n) if not isinstance(n := by_axis.get(a, x.shape[a]), torch.SymInt) else n
                for a in range(2, x.dim())]  # fmt: skip
    else:
        factors = [float(by_axis.get(a, 1.0)) for a in range(2, x.dim())]
    how = coordinate_transformation_mode
    outer = [float(by_axis.get(a, 1.0)) for a in (0, 1)] if factors else [1.0, 1.0]
    whole = factors is not None and all(f == int(f) and f >= 1 for f in factors)
    floor = (how, nearest_mode) == ("asymmetric", "floor")
    # Whole factors: the nearest pixel by half_pixel is that by asymmetric and floor.
    exact = floor or (whole and how in _COORDINATES[:2] and nearest_mode.startswith("round"))
    linear = mode in ("linear", "cubic") and how in _COORDINATES[:3]
    cubic = cubic_coeff_a == -0.75 and not exclude_outside
    fits = exact if mode == "nearest" else linear and (mode == "linear" or cubic)
    if not fits or outer != [1.0, 1.0] or keep_aspect_ratio_policy != "stretch" or rank > 3:
        raise ValueError(
            f"mode={mode}, {how}, {nearest_mode}; expected nearest (asymmetric and floor, or whole "
            "factors), linear or cubic (half_pixel or align_corners) over grid axes. Export the "
            "resizing with one of these"
        )
    names = {"nearest": "nearest", "cubic": "bicubic"}
    name = names.get(mode, {1: "linear", 2: "bilinear", 3: "trilinear"}.get(rank, ""))
    corners = {} if mode == "nearest" else {"align_corners": how == "align_corners"}
    smooth = {"antialias": True} if antialias else {}
    return F.interpolate(x, size, factors, name, **corners, **smooth)


@op("GridSample")
def _grid_sample(
    x: Tensor, grid: Any, mode: str = "linear", padding_mode: str = "zeros", align_corners: int = 0
) -> Tensor:
    names = {"linear": "bilinear", "cubic": "bicubic"}
    kind = names.get(mode, mode)
    return F.grid_sample(x, tensor(grid), kind, padding_mode, bool(align_corners))
