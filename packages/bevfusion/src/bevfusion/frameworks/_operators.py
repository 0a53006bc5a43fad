"""Operators that mmcv, mmdetection3d and OpenPCDet compile, by their definitions in torch.

Shapes and argument orders are the frameworks' own. Every function returns its result; none writes
into an argument. They are for a CPU without the compiled packages: correct first, and fast enough
for some frames.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bev_data.boxes import rotated_iou
from bevfusion.model.head import greedy_nms

MAX, MEAN = 0, 1
_PAIRS = 1 << 22
"""Distances held at once."""


def dynamic_voxelize(
    points: Tensor, voxel_size: Sequence[float], bounds: Sequence[float]
) -> Tensor:
    """The cell of each point: floor((p − low) / size), −1 in all columns outside of the bounds.

    Args:
        points: [n, 3 or more], x, y, z first [m].
        voxel_size: Edges along x, y, z [m].
        bounds: x, y, z of the lower, then of the upper corner [m].

    Returns:
        int32 [n, 3], in the order z, y, x.
    """
    size, low, high = (
        torch.as_tensor(part, dtype=torch.float32) for part in (voxel_size, bounds[:3], bounds[3:])
    )
    grid = torch.round((high - low) / size)
    cells = torch.floor((points[:, :3].float() - low) / size)
    inside = ((cells >= 0) & (cells < grid)).all(1, keepdim=True)
    return torch.where(inside, cells, -1.0).int().flip(1)


def hard_voxelize(
    points: Tensor, voxel_size: Sequence[float], bounds: Sequence[float], max_points: int,
    max_voxels: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Points by voxel, voxels in the order of their first point, both cut at the limits.

    Returns:
        Points [v, max_points, c], padded with zeros; cells int32 [v, 3] (z, y, x); number
        of points int32 [v].
    """
    cells = dynamic_voxelize(points, voxel_size, bounds)
    rows = torch.nonzero(cells[:, 0] >= 0)[:, 0]
    unique, first, voxel = np.unique(
        cells[rows].numpy(), axis=0, return_index=True, return_inverse=True
    )
    # Voxels are numbered by their first points.
    rank = np.empty(len(unique), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(unique))
    owner = rank[voxel.reshape(-1)]
    # A point's place in its voxel: how many of the same voxel come before it.
    order = np.argsort(owner, kind="stable")
    starts = np.searchsorted(owner[order], np.arange(len(unique)))
    slot = np.empty(len(owner), np.int64)
    slot[order] = np.arange(len(owner)) - starts[owner[order]]
    kept = (slot < max_points) & (owner < max_voxels)
    count = min(len(unique), max_voxels)
    voxels = points.new_zeros(count, max_points, points.shape[1])
    voxels[owner[kept], slot[kept]] = points[rows[kept]]
    coords = torch.zeros(count, 3, dtype=torch.int32)
    coords[owner[kept]] = cells[rows[kept]]
    numbers = torch.from_numpy(np.bincount(owner[kept], minlength=count)[:count].astype(np.int32))
    return voxels, coords, numbers


def scatter_points(
    features: Tensor, cells: Tensor, how: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reduce the features of each cell's points; points with a negative coordinate are left out.

    Args:
        features: [n, c].
        cells: Integers [n, d].
        how: "max", "sum" or "mean".

    Returns:
        Features [m, c] of the cells in lexical order, cells [m, d], the cell of each point int32
        [n] (−1 for none), points of each cell int32 [m].
    """
    inside = (cells >= 0).all(1)
    unique, owner = torch.unique(cells[inside], dim=0, return_inverse=True)
    count = torch.bincount(owner, minlength=len(unique))
    index = owner[:, None].expand(-1, features.shape[1])
    reduced = features.new_zeros(len(unique), features.shape[1]).scatter_reduce(
        0, index, features[inside], {"max": "amax", "sum": "sum", "mean": "sum"}[how],
        include_self=how != "max",
    )  # fmt: skip
    if how == "mean":
        reduced = reduced / count[:, None]
    map_ = torch.full((len(cells),), -1, dtype=torch.int32)
    map_[inside] = owner.int()
    return reduced, unique, map_, count.int()


def boxes_iou_bev(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union seen from above, of boxes [n, 7] and [m, 7]; see `rotated_iou`."""
    found = rotated_iou(a[:, :7].detach().numpy(), b[:, :7].detach().numpy())
    return torch.from_numpy(found).to(a.dtype)


def boxes_overlap_bev(a: Tensor, b: Tensor) -> Tensor:
    """Area of the intersection seen from above: iou · (A + B) / (1 + iou), [n, m] in m²."""
    iou = boxes_iou_bev(a, b)
    areas = (a[:, 3] * a[:, 4])[:, None] + (b[:, 3] * b[:, 4])[None]
    return iou * areas / (1 + iou)


def nms(overlap: Tensor, threshold: float) -> Tensor:
    """Rows, sorted by score, that no better kept row overlaps by more than the threshold."""
    return torch.from_numpy(greedy_nms((overlap > threshold).numpy()))


def aligned_iou(a: Tensor, b: Tensor, offset: float = 0.0) -> Tensor:
    """Overlap of boxes [n, 4] and [m, 4] (x1, y1, x2, y2), whose sizes are x2 − x1 + offset."""
    low, high = torch.max(a[:, None, :2], b[None, :, :2]), torch.min(a[:, None, 2:], b[None, :, 2:])
    shared = (high - low + offset).clamp(min=0).prod(2)
    areas = [(one[:, 2:] - one[:, :2] + offset).prod(1) for one in (a, b)]
    union = areas[0][:, None] + areas[1][None] - shared
    return shared / union.clamp(min=torch.finfo(union.dtype).tiny)


def local_points(points: Tensor, boxes: Tensor, *, bottom: bool) -> Tensor:
    """Coordinates [t, m, 3] of points [m, 3] in the axes of boxes [t, 7], origin at the centre.

    Args:
        points: x, y, z [m].
        boxes: x, y, z, sizes along x, y, z, yaw counter-clockwise from +x.
        bottom: Whether z is that of the lower face (mmcv), else of the centre (OpenPCDet).
    """
    offset = points[None] - boxes[:, None, :3]
    cos, sin = boxes[:, 6:].cos(), boxes[:, 6:].sin()
    x = offset[..., 0] * cos + offset[..., 1] * sin
    y = offset[..., 1] * cos - offset[..., 0] * sin
    z = offset[..., 2] - (boxes[:, 5:6] / 2 if bottom else 0)
    return torch.stack([x, y, z], 2)


def points_in_boxes(points: Tensor, boxes: Tensor, *, bottom: bool, margin: float = 0.0) -> Tensor:
    """Whether each box [t, 7] holds each point [m, 3]: bool [t, m]; see `local_points`.

    A box is larger by `margin` [m] on each side along its x and y.
    """
    local, half = local_points(points, boxes, bottom=bottom).abs(), boxes[:, None, 3:6] / 2
    return (local[..., :2] < half[..., :2] + margin).all(2) & (local[..., 2] <= half[..., 2])


def roiaware_pool(
    boxes: Tensor, points: Tensor, features: Tensor, cells: tuple[int, int, int], most: int,
    how: int, *, bottom: bool, margin: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Pool the features of the points in each cell of each box (Part-A², Shi et al. 2020).

    Args:
        boxes: [n, 7].
        points: [m, 3].
        features: [m, c].
        cells: Along x, y, z of a box.
        most: Points of a cell that enter, plus one.
        how: `MAX` or `MEAN`.
        bottom: See `local_points`.
        margin: See `points_in_boxes`.

    Returns:
        Pooled features [n, x, y, z, c], 0 in empty cells; row of the largest value int32, −1 in
        empty cells (of `MAX`); the number of points, then their rows int32 [n, x, y, z, most].
    """
    shape = (len(boxes), *cells)
    pooled = features.new_zeros(*shape, features.shape[1])
    largest = torch.full_like(pooled, -1, dtype=torch.int32)
    members = torch.zeros(*shape, most, dtype=torch.int32)
    local = local_points(points, boxes, bottom=bottom)
    inside = points_in_boxes(points, boxes, bottom=bottom, margin=margin)
    steps = torch.tensor(cells)
    for box in range(len(boxes)):
        rows = torch.nonzero(inside[box])[:, 0]
        place = ((local[box, rows] / boxes[box, 3:6] + 0.5) * steps).long()
        # A point on an upper face is in the last cell.
        place = torch.minimum(place.clamp(min=0), steps - 1)
        for row, (x, y, z) in zip(rows.tolist(), place.tolist(), strict=True):
            own = members[box, x, y, z]
            if own[0] < most - 1:
                own[0] += 1
                own[own[0]] = row
        for x, y, z in torch.nonzero(members[box, ..., 0]).tolist():
            own = members[box, x, y, z]
            chosen = own[1 : 1 + int(own[0])].long()
            values = features[chosen]
            if how == MAX:
                pooled[box, x, y, z], best = values.max(0)
                largest[box, x, y, z] = chosen[best].int()
            else:
                pooled[box, x, y, z] = values.mean(0)
    return pooled, largest, members


def roipoint_pool(
    points: Tensor, boxes: Tensor, features: Tensor, pooled: Tensor, empty: Tensor, *,
    bottom: bool, margin: float = 0.0,
) -> None:  # fmt: skip
    """Write the first points of each box, with their features (PointRCNN, Shi et al. 2019).

    A box with fewer points starts again from its first one.

    Args:
        points: [b, n, 3].
        boxes: [b, t, 7].
        features: [b, n, c].
        pooled: [b, t, samples, 3 + c], left as it is for boxes without points.
        empty: Integers [b, t], 1 for boxes without points.
        bottom: See `local_points`.
        margin: See `points_in_boxes`.
    """
    samples = torch.arange(pooled.shape[2])
    for frame, (place, own) in enumerate(zip(points, boxes, strict=True)):
        inside = points_in_boxes(place, own, bottom=bottom, margin=margin)
        both = torch.cat([place, features[frame]], 1)
        for box, members in enumerate(inside):
            rows = torch.nonzero(members)[: len(samples), 0]
            empty[frame, box] = int(not len(rows))
            if len(rows):
                pooled[frame, box] = both[rows[samples % len(rows)]]


def three_nn(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distances [b, n, 3] and rows int32 of the three nearest of [b, m, 3] to [b, n, 3]."""
    parts = []
    for some in target.split(max(1, _PAIRS // source.shape[1]), 1):
        distances = (some[:, :, None] - source[:, None]).square().sum(3)
        sorted_ = distances.sort(dim=2, stable=True)
        parts.append((sorted_.values[..., :3], sorted_.indices[..., :3].int()))
    squared, rows = zip(*parts, strict=True)
    return torch.cat(squared, 1), torch.cat(rows, 1)


def three_interpolate(features: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Σ_k weights_k · features[rows_k]: [b, c, m], [b, n, 3], [b, n, 3] → [b, c, n]."""
    return (group_points(features, rows) * weights[:, None]).sum(3)


def group_points(features: Tensor, rows: Tensor) -> Tensor:
    """Features [b, c, n] at rows [b, p, s]: [b, c, p, s]."""
    batch, channels, _ = features.shape
    flat = rows.long().reshape(batch, 1, -1).expand(-1, channels, -1)
    return features.gather(2, flat).reshape(batch, channels, *rows.shape[1:])


def ball_query(
    centers: Tensor, points: Tensor, low: float, high: float, samples: int
) -> tuple[Tensor, Tensor]:
    """The first points of each ball with low² ≤ d² < high² (or d = 0), in the order of the points.

    A ball with fewer points repeats its first one.

    Args:
        centers: [m, 3].
        points: [n, 3].
        low: Smallest distance [m].
        high: Largest distance [m].
        samples: Points of each ball.

    Returns:
        Rows int32 [m, samples], 0 in empty balls; whether each ball is empty, bool [m].
    """
    parts = []
    for some in centers.split(max(1, _PAIRS // max(1, len(points)))):
        squared = (some[:, None] - points[None]).square().sum(2)
        inside = (squared == 0) | ((squared >= low * low) & (squared < high * high))
        found = torch.where(inside, torch.arange(len(points)), len(points))
        parts.append(found.topk(min(samples, len(points)), 1, largest=False).values)
    order = functional.pad(torch.cat(parts), (0, max(0, samples - len(points))), value=len(points))
    first = order[:, :1]
    rows = torch.where(order < len(points), order, first)
    empty = first[:, 0] >= len(points)
    return torch.where(empty[:, None], 0, rows).int(), empty


def furthest_points(distances_to: Tensor, count: int, *, pairwise: bool) -> Tensor:
    """Row 0, then again and again the row farthest from all chosen ones; the first of equals.

    Takes points [n, 3], or with `pairwise` their squared distances [n, n].
    """
    chosen: Tensor = _furthest_points(distances_to, count, pairwise)
    return chosen


# One operator of a traced graph: its loop would be thousands of them.
@torch.library.custom_op("bevfusion::furthest_points", mutates_args=())
def _furthest_points(distances_to: Tensor, count: int, pairwise: bool) -> Tensor:
    chosen = torch.zeros(count, dtype=torch.int32)
    nearest = torch.full((len(distances_to),), 1e10, dtype=distances_to.dtype)
    for step in range(1, count):
        last = int(chosen[step - 1])
        if pairwise:
            squared = distances_to[last]
        else:
            squared = (distances_to - distances_to[last]).square().sum(1)
        nearest = torch.minimum(nearest, squared)
        chosen[step] = int(nearest.argmax())
    return chosen


@_furthest_points.register_fake
def _(distances_to: Tensor, count: int, pairwise: bool) -> Tensor:
    return distances_to.new_empty(count, dtype=torch.int32)


def deformable_conv2d(
    x: Tensor, weight: Tensor, offset: Tensor, mask: Tensor | None, bias: Tensor | None = None, *,
    stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int], groups: int,
    offset_groups: int,
) -> Tensor:  # fmt: skip
    """y(p) = Σ_k w_k · m_k(p) · x(p + p_k + Δ_k(p)) (Dai et al. 2017; with mask Zhu et al. 2019).

    Args:
        x: [b, c, h, w].
        weight: [out, c / groups, kh, kw].
        offset: [b, offset_groups · kh · kw · 2, oh, ow], y before x.
        mask: [b, offset_groups · kh · kw, oh, ow]; None for ones.
        bias: [out].
        stride: Along y, x; as the next two.
        padding: Zeros on both sides.
        dilation: Between taps.
        groups: Of the convolution.
        offset_groups: Groups of channels that share offsets.
    """
    batch, channels, height, width = x.shape
    kh, kw = weight.shape[2:]
    oh, ow = offset.shape[2:]
    taps = kh * kw
    shift = offset.view(batch, offset_groups, taps, 2, oh, ow)
    ky = torch.arange(kh).repeat_interleave(kw) * dilation[0] - padding[0]
    kx = torch.arange(kw).repeat(kh) * dilation[1] - padding[1]
    y = shift[:, :, :, 0] + ky.view(-1, 1, 1) + (torch.arange(oh) * stride[0]).view(-1, 1)
    x_ = shift[:, :, :, 1] + kx.view(-1, 1, 1) + torch.arange(ow) * stride[1]
    # Positions as `grid_sample` reads them.
    grid = torch.stack([(2 * x_ + 1) / width - 1, (2 * y + 1) / height - 1], -1)
    image = x.reshape(batch * offset_groups, channels // offset_groups, height, width)
    columns = functional.grid_sample(
        image, grid.reshape(batch * offset_groups, taps * oh, ow, 2), align_corners=False
    ).view(batch, offset_groups, -1, taps, oh, ow)
    if mask is not None:
        columns = columns * mask.view(batch, offset_groups, 1, taps, oh, ow)
    columns = columns.reshape(batch, channels * taps, oh, ow)
    # A convolution, which qnn quantizes with the samples.
    return functional.conv2d(columns, weight.flatten(1)[..., None, None], bias, groups=groups)


def bev_pool(
    features: Tensor, cells: Tensor, lengths: Tensor, starts: Tensor, size: tuple[int, ...]
) -> Tensor:
    """Sum the rows of each interval into the cell of its first row (Liu et al. 2023).

    Args:
        features: [n, c], sorted by cell.
        cells: [n, 4]: x, y, z, batch.
        lengths: Rows of each interval.
        starts: First row of each interval.
        size: Batch, z, x, y.

    Returns:
        [batch, z, x, y, c].
    """
    owner = torch.repeat_interleave(torch.arange(len(starts)), lengths.long())
    rows = torch.cat(
        [torch.arange(s, s + n) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    )
    sums = features.new_zeros(len(starts), features.shape[1]).index_add(0, owner, features[rows])
    x, y, z, batch = cells[starts.long()].long().unbind(1)
    out = features.new_zeros(*size, features.shape[1])
    out[batch, z, x, y] = sums
    return out
