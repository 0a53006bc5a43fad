"""Names of OpenPCDet's compiled modules over `_operators`.

Its functions fill the outputs that they are given. Boxes have their z at the centre.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bevfusion.frameworks import _operators as operators

Functions = Mapping[str, Callable[..., Any]]
"""Of a compiled module, by name."""
CPU_MARGIN, MARGIN = 1e-2, 1e-5
_CENTRED: dict[str, Any] = {"bottom": False, "margin": MARGIN}
"""Along x and y of a box [m], where points still count as inside: on the CPU, on CUDA."""


def _tensors(function: Callable[..., None]) -> Callable[..., None]:
    """The function with the tensors among the arguments: sizes stand in front of them."""
    return lambda *args: function(*(one for one in args if isinstance(one, Tensor)))


def into(function: Callable[..., Any], outputs: int = 1) -> Callable[..., None]:
    """The function with its outputs as last arguments, which are filled; keywords are sizes."""

    def fill(*given: Any, **sizes: int) -> None:
        made = function(*given[:-outputs])
        for out, value in zip(given[-outputs:], [made] if outputs == 1 else made, strict=True):
            out.copy_(value.reshape(out.shape))

    return fill


def _of_pairs(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., None]:
    return into(lambda a, b: function(a, b).diagonal())


def _counted(function: Callable[..., None]) -> Callable[[Tensor, Tensor, float], int]:
    def nms(boxes: Tensor, keep: Tensor, threshold: float) -> int:
        number = torch.zeros((), dtype=torch.int64)
        function(boxes, keep, number, nms_overlap_thresh=threshold)
        return int(number)

    return nms


def boxes_hold(boxes: Tensor, points: Tensor, **convention: Any) -> Tensor:
    """`operators.points_in_boxes` in the frameworks' order."""
    return operators.points_in_boxes(points, boxes, **convention)


def points_in_boxes(boxes: Tensor, points: Tensor, out: Tensor, **convention: Any) -> None:
    """Number of the first box that holds a point, frame by frame; −1 outside of all.

    Here and below `convention` is `bottom` and `margin` of the operator.
    """
    for own, place, found in zip(boxes, points, out, strict=True):
        inside = operators.points_in_boxes(place, own, **convention)
        found.copy_(torch.where(inside.any(0), inside.int().argmax(0), -1))


def roiaware_pool(
    boxes: Tensor, points: Tensor, features: Tensor, largest: Tensor, members: Tensor,
    pooled: Tensor, pool_method: int, **convention: Any,
) -> None:  # fmt: skip
    """Features of the points in each cell of a box."""
    x, y, z = map(int, pooled.shape[1:4])
    found = operators.roiaware_pool(
        boxes, points, features, (x, y, z), members.shape[-1], pool_method, **convention
    )
    for given, result in zip((pooled, largest, members), found, strict=True):
        given.copy_(result)


def _ingroup(groups: Tensor, out: Tensor) -> None:
    """The rank of each row within its group; CUDA gives the ranks in any order."""
    order = groups.argsort(stable=True)
    counts = groups.unique(return_counts=True)[1]
    out[order] = torch.arange(len(groups)) - (counts.cumsum(0) - counts).repeat_interleave(counts)


def _stack_furthest(
    points: Tensor, nearest: Tensor, counts: Tensor, out: Tensor, numbers: Tensor
) -> None:
    start, chosen = 0, []
    for own, number in zip(points.split(counts.tolist()), numbers.tolist(), strict=True):
        chosen.append(start + operators.furthest_points(own, number, pairwise=False))
        start += len(own)
    out.copy_(torch.cat(chosen))


def _stack_three_nn(
    target: Tensor, target_counts: Tensor, source: Tensor, counts: Tensor, squared: Tensor,
    rows: Tensor,
) -> None:  # fmt: skip
    start, done = 0, 0
    parts = zip(target.split(target_counts.tolist()), source.split(counts.tolist()), strict=True)
    for own, other in parts:
        found, nearest = operators.three_nn(own[None], other[None])
        squared[done : done + len(own)] = found[0]
        rows[done : done + len(own)] = nearest[0] + start
        start, done = start + len(other), done + len(own)


def _stack_three_interpolate(features: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    return (features[rows.long()] * weights[..., None]).sum(1)


def _voxel_query(
    m: int, depth: int, height: int, width: int, samples: int, radius: float, z_range: int,
    y_range: int, x_range: int, centers: Tensor, points: Tensor, coords: Tensor, owners: Tensor,
    rows: Tensor,
) -> None:  # fmt: skip
    """The first points with d² ≤ radius² of the voxels around each centre's, in z, y, x order."""
    ranges = [range(-reach, reach + 1) for reach in (z_range, y_range, x_range)]
    steps = torch.tensor(list(product(*ranges)))
    places = coords[:, None, 1:].long() + steps
    grid = torch.tensor([depth, height, width])
    inside = ((places >= 0) & (places < grid)).all(2)
    z, y, x = torch.minimum(places.clamp(min=0), grid - 1).unbind(2)
    found = owners[coords[:, :1].long(), z, y, x].long()
    squared = (points[found.clamp(min=0)] - centers[:, None]).square().sum(2)
    inside &= (found >= 0) & (squared <= radius * radius)
    for own, candidates, row in zip(inside, found, rows, strict=True):
        chosen = candidates[own][:samples]
        if len(chosen):
            row.fill_(int(chosen[0]))
            row[: len(chosen)] = chosen.int()
        else:
            row[0] = -1


def openpcdet_extensions(mmcv: Functions) -> Mapping[str, Functions]:
    """Functions by the last part of the module's name; some are mmcv's in another order."""

    def ball_query(b: int, n: int, m: int, radius: float, samples: int, *tensors: Tensor) -> None:
        mmcv["ball_query_forward"](*tensors, b, n, m, 0.0, radius, samples)

    def stack_ball_query(b: int, m: int, radius: float, samples: int, *tensors: Tensor) -> None:
        mmcv["stack_ball_query_forward"](*tensors, radius, samples)

    def furthest(b: int, n: int, m: int, *tensors: Tensor) -> None:
        mmcv["furthest_point_sampling_forward"](*tensors, b, n, m)

    return {
        "ingroup_inds_cuda": {"forward": _ingroup},
        "iou3d_nms_cuda": {
            "boxes_aligned_iou_bev_cpu": _of_pairs(operators.boxes_iou_bev),
            "boxes_aligned_overlap_bev_gpu": _of_pairs(operators.boxes_overlap_bev),
            "boxes_iou_bev_cpu": into(operators.boxes_iou_bev),
            "boxes_iou_bev_gpu": into(operators.boxes_iou_bev),
            "boxes_overlap_bev_gpu": mmcv["iou3d_boxes_overlap_bev_forward"],
            "nms_gpu": _counted(mmcv["iou3d_nms3d_forward"]),
            "nms_normal_gpu": _counted(mmcv["iou3d_nms3d_normal_forward"]),
            "paired_boxes_overlap_bev_gpu": _of_pairs(operators.boxes_overlap_bev),
        },
        "pointnet2_batch_cuda": {
            "ball_query_wrapper": ball_query,
            "farthest_point_sampling_wrapper": furthest,
            "gather_points_wrapper": _tensors(mmcv["gather_points_forward"]),
            "group_points_wrapper": _tensors(mmcv["group_points_forward"]),
            "three_interpolate_wrapper": _tensors(mmcv["three_interpolate_forward"]),
            "three_nn_wrapper": _tensors(mmcv["three_nn_forward"]),
        },
        "pointnet2_stack_cuda": {
            "ball_query_wrapper": stack_ball_query,
            "farthest_point_sampling_wrapper": furthest,
            "group_points_wrapper": _tensors(mmcv["stack_group_points_forward"]),
            "stack_farthest_point_sampling_wrapper": _stack_furthest,
            "three_interpolate_wrapper": into(_stack_three_interpolate),
            "three_nn_wrapper": _stack_three_nn,
            "voxel_query_wrapper": _voxel_query,
        },
        "roiaware_pool3d_cuda": {
            "forward": partial(roiaware_pool, **_CENTRED),
            "points_in_boxes_cpu": into(partial(boxes_hold, bottom=False, margin=CPU_MARGIN)),
            "points_in_boxes_gpu": partial(points_in_boxes, **_CENTRED),
        },
        "roipoint_pool3d_cuda": {"forward": partial(operators.roipoint_pool, **_CENTRED)},
    }
