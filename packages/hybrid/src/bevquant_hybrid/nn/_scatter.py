"""Features of pillars, put where the pillars stand in the picture seen from above."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bevquant_hybrid._torch_operator import operator
from bevquant_hybrid.qtensor import QTensor, as_float, payload

__all__ = ["PointPillarsScatter"]

Shape = Sequence[int] | Tensor


class PointPillarsScatter(nn.Module):
    """Write the features of pillars into a picture of zeros.

    The scale of a quantized input is that of the output. In ONNX files it is a ScatterND, which
    leaves open what counts of several pillars at one place.

    Args:
        output_shape: ``(N, C, H, W)``; None where each call gives it.

    Example:
        >>> features = torch.tensor([[1.0, 2.0]])  # one pillar, two channels
        >>> place = torch.tensor([[0, 0, 1, 0]])  # sample 0, row 1, column 0
        >>> PointPillarsScatter()(features, place, (1, 2, 2, 2))[0, :, 1, 0]
        tensor([1., 2.])
    """

    def __init__(self, output_shape: Shape | None = None) -> None:
        super().__init__()
        self.output_shape = output_shape

    def forward(
        self, voxel_features: Tensor, coords: Tensor, output_shape: Shape | None = None
    ) -> Tensor:
        """Scatter.

        Args:
            voxel_features: ``[M, …]``; what follows M is flattened to the channels.
            coords: ``[M, (n, …, y, x)]``: the sample, the row and the column of each pillar, in
                grid cells. A pillar whose sample is negative is left out; of several at one place
                the last counts.
            output_shape: ``(N, C, H, W)``, in place of the module's own.

        Returns:
            ``[N, C, H, W]``.

        Raises:
            ValueError: Shapes that do not fit, or places outside the picture.
        """
        given = self.output_shape if output_shape is None else output_shape
        if given is None:
            raise ValueError(
                "PointPillarsScatter: no output_shape; give it to the module or to the call"
            )
        batch, channels, height, width = (int(n) for n in given)
        features = payload(voxel_features).flatten(1)
        places = as_float(coords).long()
        shape = [batch, channels, height, width]
        if isinstance(voxel_features, QTensor) and voxel_features.holds_integers:
            return voxel_features.like(scatter_pillars(features, places, shape))
        if not torch._C._is_tracing():  # while torch.jit traces, sizes are tensors
            _check(features, places, shape)
        picture = _scattered(features, places, shape)
        return voxel_features.like(picture) if isinstance(voxel_features, QTensor) else picture


def _check(features: Tensor, places: Tensor, shape: Sequence[int]) -> None:
    """Refuse what does not fit the picture."""
    batch, channels, height, width = shape
    if places.dim() != 2 or len(places) != len(features) or features.shape[1] != channels:
        raise ValueError(
            f"PointPillarsScatter: expected features [M, {channels}] and coords [M, (n, …, y, x)], "
            f"got {tuple(features.shape)} and {tuple(places.shape)}"
        )
    sample, row, column = places[:, 0], places[:, -2], places[:, -1]
    inside = (sample < batch) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    outside = ~(inside | (sample < 0))
    if bool(outside.any()):
        raise ValueError(
            f"PointPillarsScatter: a pillar at {places[outside][0].tolist()} lies outside "
            f"{tuple(shape)}; cut the points to the range of the grid first"
        )


def _scattered(features: Tensor, places: Tensor, shape: Sequence[int]) -> Tensor:
    batch, channels, height, width = shape
    sample, row, column = places[:, 0], places[:, -2], places[:, -1]
    cells = batch * height * width
    cell = torch.where(sample < 0, cells, (sample * height + row) * width + column)
    if torch.onnx.is_in_onnx_export():  # ScatterND, for which equal places are undefined
        canvas = features.new_zeros(cells + 1, channels).index_put((cell,), features)
        return canvas[:cells].reshape(batch, height, width, channels).permute(0, 3, 1, 2)
    order = torch.arange(len(places), device=places.device)
    # One cell more, for pillars that are left out.
    winner = order.new_full((cells + 1,), -1).scatter_reduce(0, cell, order, "amax")[:cells]
    # And one row of zeros, for cells without a pillar.
    rows = torch.cat([features, features.new_zeros(1, channels)])
    picked = rows[torch.where(winner < 0, len(places), winner)]
    return picked.reshape(batch, height, width, channels).permute(0, 3, 1, 2).contiguous()


@operator("(Tensor features, Tensor places, int[] shape) -> Tensor")
def scatter_pillars(features: Tensor, places: Tensor, shape: Sequence[int]) -> Tensor:
    """Features ``[M, C]`` at places ``[M, (n, …, y, x)]`` of a picture of zeros.

    Raises:
        ValueError: Shapes that do not fit, or places outside the picture.
    """
    # Here and not before the call: no recorder or tracer looks into an operator, and a decision
    # that depends on values can be neither recorded nor traced.
    _check(features, places, shape)
    return _scattered(features, places, shape)
