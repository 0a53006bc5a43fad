"""Names of compiled extensions over `_operators`: mmcv._ext, bev_pool_ext and others.

The frameworks allocate outputs and pass them in; these functions fill them. A name without a
stand-in can be imported, and raises when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bevfusion.frameworks import _operators as operators
from bevfusion.frameworks._openpcdet_operators import (
    Functions,
    boxes_hold,
    into,
    openpcdet_extensions,
    points_in_boxes,
    roiaware_pool,
)
from bevquant_graph import deformable_attention


def _dynamic_voxelize(
    points: Tensor, voxel_size: Tensor, bounds: Tensor, cells: Tensor, NDim: int = 3
) -> None:
    cells.copy_(operators.dynamic_voxelize(points, voxel_size.tolist(), bounds.tolist()))


def _hard_voxelize(
    points: Tensor, voxel_size: Tensor, bounds: Tensor, voxels: Tensor, cells: Tensor,
    counts: Tensor, number: Tensor, max_points: int, max_voxels: int, NDim: int = 3,
    deterministic: bool = True,
) -> None:  # fmt: skip
    found = operators.hard_voxelize(
        points, voxel_size.tolist(), bounds.tolist(), max_points, max_voxels
    )
    for given, result in zip((voxels, cells, counts), found, strict=True):
        given[: len(result)] = result
    number.fill_(len(found[0]))


def _upright_iou(boxes: Tensor, others: Tensor) -> Tensor:
    first, second = (
        torch.cat([b[:, :2] - b[:, 3:5] / 2, b[:, :2] + b[:, 3:5] / 2], 1) for b in (boxes, others)
    )
    return operators.aligned_iou(first, second)


def _nms3d(
    boxes: Tensor, keep: Tensor, number: Tensor, nms_overlap_thresh: float,
    overlap: Callable[[Tensor, Tensor], Tensor] = operators.boxes_iou_bev,
) -> None:  # fmt: skip
    rows = operators.nms(overlap(boxes, boxes), nms_overlap_thresh)
    keep[: len(rows)] = rows
    number.fill_(len(rows))


def _nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    order = scores.sort(descending=True, stable=True).indices
    overlap = operators.aligned_iou(boxes[order], boxes[order], offset)
    return order[operators.nms(overlap, iou_threshold)]


def _as_seven(boxes: Tensor) -> Tensor:
    """x, y, width, height, angle as x, y, z, sizes, yaw."""
    one = torch.ones_like(boxes[:, :1])
    return torch.cat([boxes[:, :2], 0 * one, boxes[:, 2:4], one, boxes[:, 4:5]], 1)


def _nms_rotated(
    boxes: Tensor, scores: Tensor, order: Tensor, sorted_boxes: Tensor, labels: Tensor,
    iou_threshold: float, multi_label: bool,
) -> Tensor:  # fmt: skip
    seven = _as_seven(sorted_boxes)
    overlap = operators.boxes_iou_bev(seven, seven)
    if multi_label:
        own = sorted_boxes[:, 5]
        overlap = torch.where(own[:, None] == own[None], overlap, 0)
    return order[operators.nms(overlap, iou_threshold)]


def _iou_rotated(a: Tensor, b: Tensor, out: Tensor, mode_flag: int, aligned: bool) -> None:
    first, second = _as_seven(a), _as_seven(b)
    if mode_flag == 0:
        found = operators.boxes_iou_bev(first, second)
    else:  # intersection over the first box
        found = operators.boxes_overlap_bev(first, second) / (first[:, 3] * first[:, 4])[:, None]
    out.copy_((found.diagonal() if aligned else found).reshape(out.shape))


def _points_in_boxes_all(boxes: Tensor, points: Tensor, out: Tensor) -> None:
    for own, place, found in zip(boxes, points, out, strict=True):
        found.copy_(operators.points_in_boxes(place, own, bottom=True).T)


def _ball_query(
    centers: Tensor, points: Tensor, rows: Tensor, b: int, n: int, m: int, min_radius: float,
    max_radius: float, nsample: int,
) -> None:  # fmt: skip
    for own, place, found in zip(centers, points, rows, strict=True):
        found.copy_(operators.ball_query(own, place, min_radius, max_radius, nsample)[0])


def _stack_ball_query(
    centers: Tensor, center_counts: Tensor, points: Tensor, counts: Tensor, rows: Tensor,
    max_radius: float, nsample: int,
) -> None:  # fmt: skip
    groups = (part.split(number.tolist()) for part, number in (
        (centers, center_counts), (points, counts), (rows, center_counts)))  # fmt: skip
    for own, place, found in zip(*groups, strict=True):
        result, empty = operators.ball_query(own, place, 0.0, max_radius, nsample)
        found.copy_(result)
        found[:, 0][empty] = -1


def _stack_group_points(
    features: Tensor, counts: Tensor, rows: Tensor, row_counts: Tensor, out: Tensor, **_: int
) -> None:
    parts = zip(features.split(counts.tolist()), rows.split(row_counts.tolist()), strict=True)
    out.copy_(torch.cat([own[place.long()].transpose(1, 2) for own, place in parts]))


def _furthest(
    points: Tensor, nearest: Tensor, out: Tensor, b: int, n: int, m: int, pairwise: bool = False
) -> None:
    for own, found in zip(points, out, strict=True):
        found.copy_(operators.furthest_points(own, m, pairwise=pairwise))


def _attention_without_starts(
    value: Tensor, shapes: Tensor, places: Tensor, weights: Tensor
) -> Tensor:
    """Mmcv's own form for CPUs, as the one operator."""
    starts = torch.cat([shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]])
    return deformable_attention(value, shapes, starts, places, weights)


def _deform_conv(
    x: Tensor, weight: Tensor, offset: Tensor, out: Tensor, columns: Tensor, ones: Tensor, *,
    kW: int, kH: int, dW: int, dH: int, padW: int, padH: int, dilationW: int, dilationH: int,
    group: int, deformable_group: int, im2col_step: int,
) -> None:  # fmt: skip
    result = operators.deformable_conv2d(
        x, weight, offset, None, stride=(dH, dW), padding=(padH, padW),
        dilation=(dilationH, dilationW), groups=group, offset_groups=deformable_group,
    )  # fmt: skip
    out.copy_(result.view(out.shape))


def _modulated_deform_conv(
    x: Tensor, weight: Tensor, bias: Tensor, ones: Tensor, offset: Tensor, mask: Tensor,
    out: Tensor, columns: Tensor, *, kernel_h: int, kernel_w: int, stride_h: int, stride_w: int,
    pad_h: int, pad_w: int, dilation_h: int, dilation_w: int, group: int, deformable_group: int,
    with_bias: bool,
) -> None:  # fmt: skip
    result = operators.deformable_conv2d(
        x, weight, offset, mask, bias if with_bias else None, stride=(stride_h, stride_w),
        padding=(pad_h, pad_w), dilation=(dilation_h, dilation_w), groups=group,
        offset_groups=deformable_group,
    )  # fmt: skip
    out.copy_(result)


MMCV: Functions = {
    "ball_query_forward": _ball_query,
    "box_iou_rotated": _iou_rotated,
    "deform_conv_forward": _deform_conv,
    "dynamic_point_to_voxel_forward": operators.scatter_points,
    "dynamic_voxelize_forward": _dynamic_voxelize,
    "furthest_point_sampling_forward": _furthest,
    "furthest_point_sampling_with_dist_forward": partial(_furthest, pairwise=True),
    "gather_points_forward": into(
        lambda x, rows: operators.group_points(x, rows[..., None])[..., 0]
    ),
    "group_points_forward": into(operators.group_points),
    "hard_voxelize_forward": _hard_voxelize,
    "iou3d_boxes_overlap_bev_forward": into(operators.boxes_overlap_bev),
    "iou3d_nms3d_forward": _nms3d,
    "iou3d_nms3d_normal_forward": partial(_nms3d, overlap=_upright_iou),
    "modulated_deform_conv_forward": _modulated_deform_conv,
    "ms_deform_attn_forward": lambda *given, im2col_step=64: deformable_attention(*given),
    "nms": _nms,
    "nms_rotated": _nms_rotated,
    "points_in_boxes_all_forward": _points_in_boxes_all,
    "points_in_boxes_cpu_forward": into(partial(boxes_hold, bottom=True)),
    "points_in_boxes_part_forward": partial(points_in_boxes, bottom=True),
    "roiaware_pool3d_forward": partial(roiaware_pool, bottom=True),
    "roipoint_pool3d_forward": partial(operators.roipoint_pool, bottom=True),
    "stack_ball_query_forward": _stack_ball_query,
    "stack_group_points_forward": _stack_group_points,
    "three_interpolate_forward": into(operators.three_interpolate),
    "three_nn_forward": into(operators.three_nn, 2),
}
"""Of `mmcv._ext`."""

EXTENSIONS: Mapping[str, Functions] = {
    "mmcv._ext": MMCV,
    "bev_pool_ext": {
        "bev_pool_forward": lambda x, cells, lengths, starts, *size: operators.bev_pool(
            x, cells, lengths, starts, size
        )
    },
    **openpcdet_extensions(MMCV),
    "bev_pool_v2_ext": {},
    "feature_decorator_ext": {},
    "voxel_layer": {},
    "sparse_conv_ext": {},
}
"""By the module's name, or by its last part: of mmcv, mmdetection3d, mit-bevfusion, OpenPCDet."""


class _Extension(ModuleType):
    def __init__(self, name: str, functions: Functions) -> None:
        super().__init__(name)
        self.__file__ = f"<stand-in for {name}>"
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(
                f"{self.__name__}.{name} has no stand-in: install the compiled package, or "
                "exclude the module that calls it from the quantized network"
            )

        return absent


class _TorchOnCpu(ModuleType):
    """torch, for modules that allocate by CUDA's types or ask for the current device."""

    cuda = SimpleNamespace(
        IntTensor=torch.IntTensor,
        FloatTensor=torch.FloatTensor,
        current_device=lambda: -1,  # what `Tensor.get_device` says of the CPU
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def allocate_on_cpu() -> None:
    """Let mmcv's operators that are written for CUDA alone run on the CPU with their stand-ins."""
    # Called once mmcv is imported. Deformable attention becomes the operator of `bevquant_graph`,
    # which samples in integers.
    attention: Any = sys.modules.get("mmcv.ops.multi_scale_deform_attn")
    if attention is not None:
        attention.multi_scale_deformable_attn_pytorch = _attention_without_starts
    for name in ("furthest_point_sample", "points_in_boxes", "knn"):
        module: Any = sys.modules.get(f"mmcv.ops.{name}")
        # The compiled package stays as it is.
        if module is not None and isinstance(sys.modules.get("mmcv._ext"), _Extension):
            module.torch = _TorchOnCpu("torch")


class _Finder(MetaPathFinder, Loader):
    """Finds the extensions that no other finder has."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if self._functions(name) is not None else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Extension(spec.name, self._functions(spec.name) or {})

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the stand-in is complete."""

    @staticmethod
    def _functions(name: str) -> Functions | None:
        return EXTENSIONS.get(name, EXTENSIONS.get(name.rpartition(".")[2]))


_FINDER = _Finder()


def use_operator_standins() -> None:
    """Let frameworks import without their compiled operators, in this process.

    Later imports of mmcv._ext, bev_pool_ext and OpenPCDet's ``*_cuda`` modules, where the compiled
    ones are absent, get operators in torch: voxelization, rotated overlap and suppression,
    deformable convolution and attention, BEV pooling, nearest points, balls, pooling of regions.
    Forward only, on the CPU. Other names of these modules raise NotImplementedError when called.
    A compiled module that is installed always takes precedence.

    Example:
        >>> from bevfusion.frameworks import use_operator_standins
        >>> use_operator_standins()
        >>> from mmcv.ops import nms_rotated  # doctest: +SKIP
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
