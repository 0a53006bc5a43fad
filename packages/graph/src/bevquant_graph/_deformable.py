"""Multi-scale deformable attention as one operator, which stays one node of a captured graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def deformable_attention(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    r"""Weighted sums of bilinear samples of several maps (Zhu et al. 2021, equation 3).

    .. math:: y = \sum_{l, p} A_{l, p} \, v_l(x_{l, p} w_l - \tfrac12, y_{l, p} h_l - \tfrac12)

    v is bilinear between pixel centres and 0 outside. Arguments and their order are those of mmcv's
    ``MultiScaleDeformableAttnFunction``. Differentiable in value, positions and weights.

    Args:
        value: Float ``[batch, Σ height·width, heads, depth]``.
        value_spatial_shapes: Height and width of each level, integers ``[levels, 2]``.
        value_level_start_index: First row of each level, integers ``[levels]``.
        sampling_locations: x, y in 0 … 1, ``[batch, queries, heads, levels, points, 2]``.
        attention_weights: ``[batch, queries, heads, levels, points]``.

    Returns:
        ``[batch, queries, heads · depth]``.

    Raises:
        RuntimeError: Shapes do not fit.

    Example:
        >>> value = torch.tensor([0.0, 100.0]).view(1, 2, 1, 1)
        >>> middle, weights = torch.full((1, 1, 1, 1, 1, 2), 0.5), torch.ones(1, 1, 1, 1, 1)
        >>> deformable_attention(value, torch.tensor([[1, 2]]), torch.tensor([0]), middle, weights)
        tensor([[[50.]]])
    """
    made: Tensor = _operator(
        value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights
    )
    return made


def _attend(
    value: Tensor, shapes: Tensor, starts: Tensor, places: Tensor, weights: Tensor
) -> Tensor:
    batch, _, heads, depth = value.shape
    queries = places.shape[1]
    total = value.new_zeros(batch * heads, depth, queries)
    for level, ((h, w), start) in enumerate(zip(shapes.tolist(), starts.tolist(), strict=True)):
        rows = value[:, start : start + h * w].permute(0, 2, 3, 1)
        image = rows.reshape(batch * heads, depth, h, w)
        grid = 2 * places[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
        sampled = functional.grid_sample(image, grid, align_corners=False)
        own = weights[:, :, :, level].transpose(1, 2).flatten(0, 1)[:, None]
        total = total + (sampled * own).sum(3)
    return total.view(batch, heads * depth, queries).transpose(1, 2).contiguous()


_operator = torch.library.custom_op(
    "bevquant_graph::deformable_attention", _attend, mutates_args=()
)


@_operator.register_fake
def _(value: Tensor, shapes: Tensor, starts: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return value.new_empty(value.shape[0], places.shape[1], value.shape[2] * value.shape[3])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in ctx.saved_tensors]
    with torch.enable_grad():
        made = _attend(*inputs)
    value, places, weights = torch.autograd.grad(made, (inputs[0], *inputs[3:]), grad)
    return value, None, None, places, weights


_operator.register_autograd(_backward, setup_context=_keep)
