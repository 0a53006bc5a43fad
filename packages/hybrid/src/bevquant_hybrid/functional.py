"""Functions under their documented path: colours, and results that need no DeQuantStub."""

from __future__ import annotations

import torch
from torch import Tensor

from bevquant_hybrid._colour import (
    bgr2centered_gray,
    bgr2centered_yuv,
    bgr2gray,
    bgr2rgb,
    bgr2yuv,
    centered_yuv2bgr,
    centered_yuv2rgb,
    rgb2bgr,
    rgb2centered_gray,
    rgb2centered_yuv,
    rgb2gray,
    rgb2yuv,
)
from bevquant_hybrid._leaf import wrap
from bevquant_hybrid.qtensor import as_float

__all__ = [
    "argmax",
    "bgr2centered_gray",
    "bgr2centered_yuv",
    "bgr2gray",
    "bgr2rgb",
    "bgr2yuv",
    "centered_yuv2bgr",
    "centered_yuv2rgb",
    "filter",
    "rgb2bgr",
    "rgb2centered_gray",
    "rgb2centered_yuv",
    "rgb2gray",
    "rgb2yuv",
]


@wrap()
def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Index of the largest value along `dim`, as a plain tensor.

    Args:
        input: Float or quantized.
        dim: Axis; None for the flattened tensor.
        keepdim: Keep the axis with length 1.

    Example:
        >>> argmax(torch.tensor([[1.0, 3.0]]), dim=1)
        tensor([1])
    """
    return torch.argmax(as_float(input), dim, keepdim)


@wrap()
def filter(
    *inputs: Tensor, threshold: float, idx_range: tuple[int, int] | None = None
) -> list[list[Tensor]]:
    """Keep the pixels whose largest channel in the first input exceeds a threshold.

    Args:
        *inputs: Float or quantized ``[N, C, H, W]``, of the same N, H and W.
        threshold: What the largest value must exceed.
        idx_range: First channel and last + 1 to look at, in the first input; None for all.

    Returns:
        For each sample: the largest values ``[M]``, their channels (counted from the first one
        looked at) ``[M]``, the pixels ``[M, 2]`` as row and column, and of each input ``[M, C]``.
        All dequantized, in the order of the pixels.

    Raises:
        ValueError: No inputs, or shapes that do not fit.

    Example:
        >>> scores = torch.tensor([[[[0.1, 0.9]]]])
        >>> filter(scores, threshold=0.5)
        [[tensor([0.9000]), tensor([0]), tensor([[0, 1]]), tensor([[0.9000]])]]
    """
    shapes = {(x.shape[0], *x.shape[2:]) for x in inputs}
    if len(shapes) != 1 or any(x.dim() != 4 for x in inputs):
        raise ValueError(
            "filter: expected one or more inputs [N, C, H, W] of the same N, H and W, got "
            f"{[tuple(x.shape) for x in inputs]}"
        )
    floats = [as_float(x) for x in inputs]
    start, end = idx_range or (0, floats[0].shape[1])
    largest, channels = floats[0][:, start:end].max(1)
    result = []
    for sample in range(floats[0].shape[0]):
        pixels = (largest[sample] > threshold).nonzero()
        rows, columns = pixels.unbind(1)
        picked = [x[sample, :, rows, columns].t() for x in floats]
        found = largest[sample, rows, columns], channels[sample, rows, columns]
        result.append([*found, pixels, *picked])
    return result
