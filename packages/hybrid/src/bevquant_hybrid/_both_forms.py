"""Functions that keep the scale, on quantized tensors of floats and of integers alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bevquant_hybrid import _integer_ops as ops
from bevquant_hybrid._fake_quant._function import fake_quantize
from bevquant_hybrid._sampling import grid_sample_integers
from bevquant_hybrid.dtype import qinfo
from bevquant_hybrid.qtensor import QTensor, along, as_float, payload

__all__ = ["clamp", "grid_sample", "max_pool", "pad", "resize"]


def max_pool(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Maximum over windows; the scale stays."""
    steps = kernel_size if stride is None or stride == [] else stride
    kernel, strides, sides = ops.pair(kernel_size), ops.pair(steps), ops.pair(padding)
    return ops.max_pool(x, kernel, strides, sides, ops.pair(dilation), ceil_mode)


def resize(
    x: QTensor,
    size: int | Sequence[int] | None,
    scale_factor: float | Sequence[float] | None,
    mode: str,
    align_corners: bool,
) -> QTensor:
    """Resize height and width; the result lies on the grid of the input's scale."""
    if mode not in ("nearest", "bilinear"):
        raise NotImplementedError(
            f"interpolate(mode={mode!r}): a BPU resizes by 'nearest' or 'bilinear'"
        )
    values = payload(x)
    if x.holds_integers:
        factors = scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * 2
        given = [] if scale_factor is None else [float(f) for f in factors if f is not None]
        sizes = [] if size is None else ops.pair(size)
        return x.like(ops.resize(values, sizes, given, mode, align_corners, x.rounding))
    resized = F.interpolate(
        values,
        size,
        scale_factor,
        mode,
        align_corners if mode == "bilinear" else None,
    )
    if not x.on_grid:
        return x.like(resized)
    info = qinfo(x.dtype)
    return x.like(fake_quantize(resized, x.scale, -1, info.min, info.max))


def grid_sample(
    x: QTensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool
) -> QTensor:
    """Sample by a grid; the result lies on the grid of the input's scale.

    Raises:
        NotImplementedError: Modes that a BPU does not do.
    """
    if mode not in ("nearest", "bilinear") or padding_mode not in ("zeros", "border"):
        raise NotImplementedError(
            f"grid_sample(mode={mode!r}, padding_mode={padding_mode!r}): a BPU samples by "
            "'nearest' or 'bilinear' and pads by 'zeros' or 'border'"
        )
    places = as_float(grid)
    if x.holds_integers:
        settings = mode, padding_mode, align_corners, x.rounding
        return x.like(grid_sample_integers(payload(x), places, *settings))
    sampled = F.grid_sample(payload(x), places, mode, padding_mode, align_corners)
    if not x.on_grid:
        return x.like(sampled)
    info = qinfo(x.dtype)
    return x.like(fake_quantize(sampled, x.scale, -1, info.min, info.max))


def clamp(x: QTensor, low: float | None, high: float | None) -> QTensor:
    """Clamp to the steps nearest to the bounds."""
    if not x.on_grid:
        return x.like(payload(x).clamp(low, high))
    scale = along(x.scale, x.dim(), x.q_per_channel_axis()).double()
    info = qinfo(x.dtype)
    values = payload(x)
    for bound, cut in ((low, torch.maximum), (high, torch.minimum)):
        if bound is None:
            continue
        steps = torch.floor(bound / scale + 0.5).clamp(info.min, info.max)
        limit = steps if x.holds_integers else steps * scale
        values = cut(values, limit.to(values.dtype).to(values.device))
    return x.like(values)


def pad(x: QTensor, sides: Sequence[int], mode: str, value: float) -> QTensor:
    """Pad; a constant is rounded to the nearest step.

    Raises:
        NotImplementedError: Another mode than constant and replicate.
    """
    if mode not in ("constant", "replicate"):
        raise NotImplementedError(f"pad(mode={mode!r}): a BPU pads by 'constant' or 'replicate'")
    if mode == "replicate":
        values = payload(x)
        widened = values.double() if x.holds_integers else values
        return x.like(F.pad(widened, list(sides), mode).to(values.dtype))
    filler = clamp(x.like(torch.zeros_like(payload(x))), value, value) if value else None
    constant = float(payload(filler).reshape(-1)[0]) if filler is not None else 0.0
    return x.like(F.pad(payload(x), list(sides), value=constant))
