"""The scale that leads from a range to the numbers of a format, and back."""

from __future__ import annotations

import torch
from torch import Tensor

# Upstream's threshold: below the smallest float16 above zero a range counts as zero.
SMALLEST_AMAX = 1.0 / (1 << 24)


def scales(amax: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """Return the scale to multiply with and the scale to divide by: 0 and 1 where amax is 0."""
    if amax.dtype == torch.half:
        amax = amax.float()
    if bool((amax < 0).any()):
        raise ValueError(f"amax must not be negative, its smallest value is {amax.min().item():g}")
    # A tensor over a tensor: a Python number over a tensor would be a reciprocal times the number.
    scale = torch.full((), top, dtype=torch.float32, device=amax.device) / amax
    dead = amax <= SMALLEST_AMAX
    return scale.masked_fill(dead, 0.0), scale.masked_fill(dead, 1.0)


def refuse_negative(x: Tensor) -> None:
    """Raise the error of unsigned quantization that met negative values."""
    raise TypeError(
        f"negative values (down to {x.min().item():g}) in unsigned quantization: use a signed "
        "quantizer, or put it after the ReLU"
    )
