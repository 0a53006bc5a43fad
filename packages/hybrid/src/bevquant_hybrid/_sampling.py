"""Interpolated sampling: RoIAlign and grid sampling, of floats and of integers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import bevquant_int8sim as int8sim
from bevquant_hybrid._integer_ops import operator


def _ends(at: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both neighbouring pixels of positions, the second one's weight, and a validity mask."""
    # A position up to one pixel outside takes the border's value.
    within = (at >= -1.0) & (at <= size)
    at = at.clamp(min=0.0)
    first = at.floor().long().clamp(max=size - 1)
    second = (first + 1).clamp(max=size - 1)
    share = torch.where(first >= size - 1, torch.zeros_like(at), at - first)
    return first, second, share, within


def _bilinear(maps: Tensor, sample: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Values ``[K, P, Q, C]`` of ``maps`` at rows ``[K, P]`` times columns ``[K, Q]``."""
    top, bottom, down, above = _ends(rows, maps.shape[2])
    left, right, across, beside = _ends(columns, maps.shape[3])
    pixels = maps.permute(0, 2, 3, 1)
    picture = sample[:, None, None]

    def at(y: Tensor, x: Tensor) -> Tensor:
        return pixels[picture, y[:, :, None], x[:, None, :]]

    down, across = down[:, :, None, None], across[:, None, :, None]
    upper = at(top, left) * (1 - across) + at(top, right) * across
    lower = at(bottom, left) * (1 - across) + at(bottom, right) * across
    inside = above[:, :, None, None] & beside[:, None, :, None]
    return torch.where(inside, upper * (1 - down) + lower * down, torch.zeros_like(upper))


def _points(start: Tensor, extent: Tensor, bins: int, each: int) -> Tensor:
    """Sampling positions ``[K, bins·each]``: `each` in the middle of equal parts of every bin."""
    steps = torch.arange(bins * each, device=start.device, dtype=start.dtype) + 0.5
    return start[:, None] + extent[:, None] * (steps / (bins * each))


def roi_align(
    maps: Tensor,
    boxes: Tensor,
    sample: Tensor,
    output_size: Sequence[int],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """RoIAlign (He et al., 2017): the mean of interpolated samples in every bin of a box.

    Maps ``[N, C, H, W]`` and boxes ``[K, 4]`` (left, top, right, bottom, in pixels of the model's
    input) give ``[K, C, *output_size]``; `sample` has each box's map in the batch. A sampling ratio
    of 0 or less takes one sample per pixel. `aligned` allows boxes smaller than a pixel.
    """
    high, wide = output_size
    # Pixel centres at half steps, where `aligned`.
    corners = boxes.to(maps.dtype) * spatial_scale - (0.5 if aligned else 0.0)
    start_x, start_y, end_x, end_y = corners.unbind(1)
    least = 0.0 if aligned else 1.0
    width, height = ((end_x - start_x).clamp(min=least), (end_y - start_y).clamp(min=least))
    if sampling_ratio > 0:
        groups = [(torch.arange(len(boxes), device=maps.device), sampling_ratio, sampling_ratio)]
    else:
        # One sample per pixel: boxes are sampled together where they take equally many.
        counts = torch.stack([(height / high).ceil(), (width / wide).ceil()], 1).long()
        kinds = torch.unique(counts, dim=0)
        groups = [
            ((counts == kind).all(1).nonzero()[:, 0], int(kind[0]), int(kind[1])) for kind in kinds
        ]
    result = maps.new_zeros(len(boxes), maps.shape[1], high, wide)
    for chosen, down, across in groups:
        # A box without extent takes no sample: zeros.
        if down == 0 or across == 0 or not len(chosen):
            continue
        rows = _points(start_y[chosen], height[chosen], high, down)
        columns = _points(start_x[chosen], width[chosen], wide, across)
        values = _bilinear(maps, sample[chosen], rows, columns)
        binned = values.reshape(len(chosen), high, down, wide, across, -1).mean((2, 4))
        result = result.index_copy(0, chosen, binned.permute(0, 3, 1, 2))
    return result


def multi_scale_roi_align(
    maps: Sequence[Tensor],
    boxes: Tensor,
    sample: Tensor,
    output_size: Sequence[int],
    spatial_scales: Sequence[float],
    sampling_ratio: int,
    aligned: bool,
    canonical_scale: float,
    canonical_level: float,
) -> Tensor:
    """RoIAlign with one map selected per box (Lin et al., FPN, 2017, equation 1)."""
    settings = output_size, sampling_ratio, aligned
    if len(maps) == 1:
        return roi_align(maps[0], boxes, sample, settings[0], spatial_scales[0], *settings[1:])
    # Level ⌊k₀ + log₂(√area / s₀) + 10⁻⁶⌋ with k₀ = `canonical_level` and s₀ = `canonical_scale`,
    # clipped to the levels k of the maps' scales 2⁻ᵏ.
    levels = -torch.tensor(spatial_scales, dtype=torch.float64, device=boxes.device).log2().round()
    extent = (boxes[:, 2:] - boxes[:, :2]).to(torch.float64)
    side = extent.prod(1).clamp(min=0.0).sqrt()
    wanted = torch.floor(canonical_level + torch.log2(side / canonical_scale) + 1e-6)
    level = wanted.clamp(min=levels.min(), max=levels.max())
    result = maps[0].new_zeros(len(boxes), maps[0].shape[1], *output_size)
    for values, scale, own in zip(maps, spatial_scales, levels, strict=True):
        chosen = (level == own).nonzero()[:, 0]
        if len(chosen):
            picked = boxes[chosen], sample[chosen], settings[0], scale
            aligned_values = roi_align(values, *picked, *settings[1:])
            result = result.index_copy(0, chosen, aligned_values)
    return result


# Of float64 maps, as one operator.
roi_align_real = operator(multi_scale_roi_align, "roi_align_real")


@operator
def grid_sample_integers(
    x: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool, rounding: str
) -> Tensor:
    """Integers sampled by a float64 grid, rounded to integers of the same scale."""
    values = F.grid_sample(x.double(), grid.double(), mode, padding_mode, align_corners)
    return int8sim.quantize(values, 1.0, bits=torch.iinfo(x.dtype).bits, rounding=rounding)


def sampling_places(grid: Tensor, height: int, width: int) -> Tensor:
    r"""Displacements in pixels as `grid_sample`'s positions in [−1, 1] (corners not aligned).

    :math:`(2\,(w + d_x) + 1) / W - 1`, likewise for rows; `grid` is ``[N, H', W', 2]``: d_x and d_y
    from each output point.
    """
    # The operator passes no gradient.
    if grid.requires_grad:
        return _places(grid, height, width)
    return places_of_displacements(grid, height, width)


def _places(grid: Tensor, height: int, width: int) -> Tensor:
    rows = torch.arange(grid.shape[1], device=grid.device, dtype=grid.dtype)
    columns = torch.arange(grid.shape[2], device=grid.device, dtype=grid.dtype)
    across = (2 * (grid[..., 0] + columns) + 1) / width - 1
    down = (2 * (grid[..., 1] + rows[:, None]) + 1) / height - 1
    return torch.stack([across, down], -1)


@operator
def places_of_displacements(grid: Tensor, height: int, width: int) -> Tensor:
    """`sampling_places` as one step of a program."""
    return _places(grid, height, width)
