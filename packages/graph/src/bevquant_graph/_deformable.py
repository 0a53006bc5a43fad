"""Multi-scale deformable attention as one operator, which stays one node of a captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
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


def attend_levels(
    sizes: Sequence[Sequence[int]],
    starts: Sequence[int],
    value: Tensor,
    places: Tensor,
    weights: Tensor,
) -> Tensor:
    """`deformable_attention` of known level sizes, in torch's operators, for any batch size.

    Args:
        sizes: Height and width of each level.
        starts: First row of each level.
        value: See `deformable_attention`, as for the next ones.
        places: Its `sampling_locations`.
        weights: Its `attention_weights`.

    Example:
        >>> value = torch.tensor([0.0, 100.0]).view(1, 2, 1, 1)
        >>> middle, weights = torch.full((1, 1, 1, 1, 1, 2), 0.5), torch.ones(1, 1, 1, 1, 1)
        >>> attend_levels([(1, 2)], [0], value, middle, weights)
        tensor([[[50.]]])
    """
    heads, depth = value.shape[2:]

    def sampled(level: int) -> Tensor:
        (h, w), start = sizes[level], starts[level]
        rows = value[:, start : start + h * w].permute(0, 2, 3, 1)
        grid = 2 * places[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
        samples = functional.grid_sample(
            rows.reshape(-1, depth, h, w), grid, "bilinear", "zeros", align_corners=False
        )
        own = weights[:, :, :, level].transpose(1, 2).flatten(0, 1)[:, None]
        return (samples * own).sum(3)

    total: Tensor = reduce(torch.add, map(sampled, range(len(sizes))))
    made: Tensor = total.unflatten(0, (-1, heads)).flatten(1, 2).transpose(1, 2)
    return made


def _attend(
    value: Tensor, shapes: Tensor, starts: Tensor, places: Tensor, weights: Tensor
) -> Tensor:
    made = attend_levels(shapes.tolist(), starts.tolist(), value, places, weights)
    return made.contiguous()


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
