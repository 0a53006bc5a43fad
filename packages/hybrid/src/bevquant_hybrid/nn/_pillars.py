"""Pillars of point clouds: voxelization and scattering."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bevquant_hybrid._integer_ops import operator
from bevquant_hybrid._leaf import wrap
from bevquant_hybrid.qtensor import QTensor, as_float, payload

Shape = Sequence[int] | Tensor


@wrap()
def point_pillars_preprocess(
    points_list: Sequence[Tensor],
    pc_range: Tensor,
    voxel_size: Tensor,
    max_voxels: int,
    max_points_per_voxel: int,
    use_max: bool = True,
    norm_range: Tensor | None = None,
    norm_dims: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Group points into pillars (PointPillars: Lang et al., 2019, section 2.1), on the CPU.

    Point p lies in cell :math:`\lfloor (p - p_{\min}) / size \rfloor` of the grid of
    :math:`\operatorname{round}((p_{\max} - p_{\min}) / size)` cells. Points outside the grid and
    points with a non-finite coordinate are dropped. Cells are numbered by their first point. Each
    cloud keeps its first `max_voxels` cells, each cell its first `max_points_per_voxel` points.

    Then, with `norm_range` and `norm_dims`, :math:`f_d \leftarrow (f_d - low_d) / (high_d -
    low_d)` for those dimensions of the kept points.

    The documents name the arguments. This package chose the order of cells and points, the point
    features (raw, padded with zeros after a cell's last point), and `use_max`.

    Args:
        points_list: Clouds ``[points, dimensions]``, float; x, y and z come first, in metres.
        pc_range: ``[6]``: least x, y, z, then largest.
        voxel_size: ``[3]``: a cell's sides along x, y, z.
        max_voxels: Most cells per cloud.
        max_points_per_voxel: Most points per cell.
        use_max: Return `max_voxels` rows for each cloud, for fixed shapes: rows without a cell are
            zeros with coordinates −1, which `PointPillarsScatter` skips. False: one row per cell,
            without a limit.
        norm_range: ``[2 · dimensions]``: least values, then largest.
        norm_dims: Dimensions to normalize.

    Returns:
        Features ``[rows, max_points_per_voxel, dimensions]``, and coordinates ``[rows, 4]``, int64:
        the cloud, z, y and x of the cell, cloud after cloud.

    Raises:
        ValueError: Arguments that do not fit.

    Example:
        >>> cloud = torch.tensor([[0.5, 0.5, 0.0], [1.5, 0.5, 0.0], [0.6, 0.4, 0.1]])
        >>> features, coords = point_pillars_preprocess(
        ...     [cloud], torch.tensor([0.0, 0, -1, 4, 4, 1]), torch.tensor([1.0, 1, 2]), 3, 2
        ... )
        >>> coords.tolist()  # two pillars and a row to spare
        [[0, 0, 0, 0], [0, 0, 0, 1], [-1, -1, -1, -1]]
        >>> features[0].tolist() == [cloud[0].tolist(), cloud[2].tolist()]
        True
    """
    features, coords = _point_pillars_preprocess(
        list(points_list),
        torch.as_tensor(pc_range),
        torch.as_tensor(voxel_size),
        max_voxels,
        max_points_per_voxel,
        use_max,
        None if norm_range is None else torch.as_tensor(norm_range),
        None if norm_dims is None else torch.as_tensor(norm_dims),
    )
    return features, coords


@operator
def _point_pillars_preprocess(
    points_list: Sequence[Tensor],
    pc_range: Tensor,
    voxel_size: Tensor,
    max_voxels: int,
    max_points_per_voxel: int,
    use_max: bool,
    norm_range: Tensor | None,
    norm_dims: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Implementation of `point_pillars_preprocess`."""
    shapes = [tuple(points.shape) for points in points_list]
    width = shapes[0][-1] if shapes and shapes[0] else 0
    if width < 3 or any(len(shape) != 2 or shape[1] != width for shape in shapes):
        raise ValueError(
            "point_pillars_preprocess: points_list: expected clouds [points, dimensions] of as "
            f"many dimensions each, x, y and z among them, got {shapes}"
        )
    device = points_list[0].device
    pc_range, voxel_size = pc_range.to(device), voxel_size.to(device)
    low, size = pc_range[:3].double(), voxel_size.double()
    if pc_range.shape != (6,) or voxel_size.shape != (3,) or not bool((size > 0).all()):
        raise ValueError(
            "point_pillars_preprocess: expected pc_range [6] and voxel_size [3] above 0, got "
            f"{pc_range.tolist()} and {voxel_size.tolist()}"
        )
    grid = ((pc_range[3:].double() - low) / size).round().long()
    if min(max_voxels, max_points_per_voxel, int(grid.min())) < 1:
        raise ValueError(
            f"point_pillars_preprocess: max_voxels={max_voxels}, max_points_per_voxel="
            f"{max_points_per_voxel}, a grid of {grid.tolist()} cells: expected 1 or more of each"
        )
    parts = [
        _pillars(points, low, size, grid, max_voxels if use_max else None, max_points_per_voxel)
        for points in points_list
    ]
    features = torch.cat([part[0] for part in parts])
    filled = torch.cat([part[1] for part in parts])
    if norm_range is not None and norm_dims is not None:
        features = torch.where(
            filled[:, :, None], _normalized(features, norm_range, norm_dims), 0.0
        )
    coords = []
    for number, part in enumerate(parts):
        sample = torch.where(part[1][:, 0], number, -1)
        coords.append(torch.cat([sample[:, None], part[2]], 1))
    return features, torch.cat(coords)


def _pillars(
    points: Tensor, low: Tensor, size: Tensor, grid: Tensor, count: int | None, each: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Features of a cloud's cells, a mask of their points, and z, y, x of the cells."""
    cells = ((points[:, :3].double() - low) / size).floor()
    inside = ((cells >= 0) & (cells < grid)).all(1)  # false for NaN and infinity
    points, cells = points[inside], cells[inside].long()
    number = (cells[:, 2] * grid[1] + cells[:, 1]) * grid[0] + cells[:, 0]
    _, pillar = torch.unique(number, return_inverse=True)
    found = int(pillar.max()) + 1 if len(pillar) else 0
    order = torch.arange(len(pillar), device=pillar.device)
    first = order.new_full((found,), len(pillar)).scatter_reduce(0, pillar, order, "amin")
    # `unique` numbers pillars by their cells; the order of their first points is wanted.
    pillar = torch.argsort(torch.argsort(first))[pillar]
    rows = found if count is None else count
    # A point's place in its pillar: how many of the same came before it.
    by_pillar = torch.argsort(pillar, stable=True)
    counts = torch.bincount(pillar, minlength=found)
    starts = counts.cumsum(0) - counts
    place = torch.empty_like(pillar)
    place[by_pillar] = order - starts[pillar[by_pillar]]
    kept = (pillar < rows) & (place < each)
    pillar, place = pillar[kept], place[kept]
    features = points.new_zeros(rows, each, points.shape[1])
    features[pillar, place] = points[kept]
    filled = torch.zeros(rows, each, dtype=torch.bool, device=points.device)
    filled[pillar, place] = True
    where = cells.new_full((rows, 3), -1)
    # From x, y, z to z, y, x.
    where[pillar] = cells[kept].flip(1)
    return features, filled, where


def _normalized(features: Tensor, norm_range: Tensor, norm_dims: Tensor) -> Tensor:
    width = features.shape[2]
    dims = norm_dims.long().to(features.device)
    if norm_range.shape != (2 * width,) or not bool(((dims >= 0) & (dims < width)).all()):
        raise ValueError(
            f"point_pillars_preprocess: expected norm_range [{2 * width}] and norm_dims from 0 to "
            f"{width - 1}, got {norm_range.tolist()} and {norm_dims.tolist()}"
        )
    low, high = norm_range[:width].to(features), norm_range[width:].to(features)
    result = features.clone()
    result[..., dims] = (features[..., dims] - low[dims]) / (high[dims] - low[dims])
    return result


class PointPillarsScatter(nn.Module):
    """Write pillar features into a map of zeros.

    The output keeps the scale of a quantized input. In ONNX files it is a ScatterND, whose result
    is undefined for several pillars at one place.

    Args:
        output_shape: ``(N, C, H, W)``; None if each call passes it.

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
            voxel_features: ``[M, …]``; the axes after M are flattened to the channels.
            coords: ``[M, (n, …, y, x)]``: the sample, the row and the column of each pillar, in
                grid cells. Pillars with a negative sample are skipped; of several at one place the
                last one is kept.
            output_shape: ``(N, C, H, W)``, instead of the module's.

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
    """Refuse shapes and places that do not fit the map."""
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
    # An extra cell for skipped pillars.
    winner = order.new_full((cells + 1,), -1).scatter_reduce(0, cell, order, "amax")[:cells]
    # An extra row of zeros for cells without a pillar.
    rows = torch.cat([features, features.new_zeros(1, channels)])
    picked = rows[torch.where(winner < 0, len(places), winner)]
    return picked.reshape(batch, height, width, channels).permute(0, 3, 1, 2).contiguous()


@operator
def scatter_pillars(features: Tensor, places: Tensor, shape: Sequence[int]) -> Tensor:
    """Features ``[M, C]`` at places ``[M, (n, …, y, x)]`` of a map of zeros."""
    # Inside the operator: recorders and tracers cannot follow a value-dependent branch.
    _check(features, places, shape)
    return _scattered(features, places, shape)
