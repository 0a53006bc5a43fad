"""CenterPoint against mmdetection3d 1.4's own classes, with the same weights.

They need mmdet3d 1.4.0, mmdet, mmengine and mmcv-lite, whose compiled operators none of these
modules calls: a stand-in takes their place.
"""

import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bevfusion.centerpoint import (
    PILLAR_CONFIGS,
    VOXEL_CONFIGS,
    CenterPointConfig,
    PillarConfig,
    build_centerpoint,
    decode,
    decorate,
)
from bevfusion.model import random_weights
from bevquant_sparse import use_bevquant_kernels

pytest.importorskip("mmdet3d", reason="needs mmdet3d 1.4.0 with mmcv-lite, mmdet and mmengine")
pytestmark = pytest.mark.filterwarnings("ignore")  # of their imports, on a newer torch
CONFIGS = {
    "nuscenes": ("voxel0075", VOXEL_CONFIGS["nuscenes"]),
    "nuscenes-voxel01": ("voxel01", VOXEL_CONFIGS["nuscenes-voxel01"]),
    "pillars": ("pillar02", PILLAR_CONFIGS["nuscenes"]),
}


class _Absent(types.ModuleType):
    """mmcv's compiled operators; no test may call them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: pytest.fail(f"mmcv._ext.{name} was called")


@pytest.fixture(scope="module", autouse=True)
def mmcv_without_operators() -> Iterator[None]:
    held = sys.modules.setdefault("mmcv._ext", _Absent("mmcv._ext"))
    yield
    if type(held) is _Absent:
        del sys.modules["mmcv._ext"]


def theirs(kind: str, nms: str = "") -> Any:
    """mmdetection3d's model of its own configuration file."""
    import mmdet3d.models
    from mmdet3d.registry import MODELS
    from mmengine.config import Config
    from mmengine.registry import DefaultScope

    DefaultScope.get_instance("mmdet3d", scope_name="mmdet3d")
    folder = Path(mmdet3d.__file__).parent / ".mim/configs/centerpoint"
    name = f"centerpoint_{kind}_second_secfpn{nms}_8xb4-cyclic-20e_nus-3d.py"
    return MODELS.build(Config.fromfile(folder / name).model).eval()


def pair(kind: str, config: CenterPointConfig, points: Any) -> tuple[Any, Any]:
    """Both models with the same random weights, fitted to the points."""
    ours, other = build_centerpoint(config), theirs(kind)
    features, coords, _ = ours.pts_voxel_layer(points)
    random_weights(ours, features, coords)
    state = ours.state_dict()
    wanted = other.state_dict()
    assert state.keys() == wanted.keys()
    assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in wanted.items()}
    other.load_state_dict(state)
    use_bevquant_kernels(other)  # spconv's own kernels race on several threads of a CPU
    return ours, other


def cloud(count: int, low: float, high: float) -> Any:
    generator = np.random.default_rng(0)
    points = generator.uniform(low, high, (count, 5)).astype(np.float32)
    points[:, 2] = generator.uniform(-4, 2, count)
    points[:, 3:] = generator.uniform(0, 1, (count, 2))
    return points


def apart(ours: torch.Tensor, other: torch.Tensor) -> float:
    return float((ours - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("size", CONFIGS)
def test_every_map_of_the_head_equals_theirs(size: str) -> None:
    kind, config = CONFIGS[size]
    # Dense in one corner: many points share a voxel, and residual blocks see neighbours.
    points = np.concatenate([cloud(3000, -3, 3), cloud(500, -50, 50)])
    ours, other = pair(kind, config, points)
    grouped, coords, count = ours.pts_voxel_layer.group(points)
    coords = coords[:, [0, 3, 2, 1]].contiguous()
    # In float64, in which the order of a sum does not show.
    ours, other, grouped = ours.double(), other.double(), grouped.double()
    features = grouped.sum(1) / count[:, None]
    if isinstance(config.lidar, PillarConfig):
        lidar = config.lidar
        features = decorate(grouped, count, coords, lidar.voxel_size, lidar.point_cloud_range)
    theirs_in = {"voxels": grouped, "num_points": count, "coors": coords, "voxel_centers": None}
    with torch.no_grad():
        made = ours(features, coords, 1)
        maps = other.extract_pts_feat(theirs_in, points=[torch.from_numpy(points)])
        wanted = other.pts_bbox_head(maps)
    named = {
        f"{branch}_{task}": value
        for task, ((one,),) in enumerate(zip(wanted, strict=True))
        for branch, value in one.items()
    }
    assert named.keys() == made.keys()
    differences = {name: apart(made[name], value) for name, value in named.items()}
    assert max(differences.values()) < 1e-9, differences


@pytest.mark.parametrize("nms", ["circle", "none"])
def test_boxes_equal_theirs(nms: str) -> None:
    from mmdet3d.structures import LiDARInstance3DBoxes

    config = PILLAR_CONFIGS["nuscenes"].head
    head = theirs("pillar02", "_head-circlenms").pts_bbox_head
    generator = torch.Generator().manual_seed(0)
    outputs = {
        f"{name}_{task}": torch.randn(2, channels, 128, 128, generator=generator) * scale
        for task, classes in enumerate(config.tasks)
        for (name, channels), scale in zip(
            (*config.branches, ("heatmap", len(classes))), (0.3, 1, 0.5, 1, 2, 2), strict=True
        )
    }
    per_task = tuple(
        [{name: outputs[f"{name}_{task}"].clone() for name in (*dict(config.branches), "heatmap")}]
        for task in range(len(config.tasks))
    )
    if nms == "none":
        head.test_cfg["min_radius"] = [-1.0] * 6
    made = decode(outputs, replace(config, nms=nms))
    wanted = head.predict_by_feat(per_task, [{"box_type_3d": LiDARInstance3DBoxes}] * 2)
    for ours, other in zip(made, wanted, strict=True):
        boxes = other.bboxes_3d
        assert len(ours.boxes) == len(boxes) > 100
        columns = [boxes.gravity_center, boxes.dims, boxes.yaw[:, None], boxes.tensor[:, 7:]]
        columns += [other.scores_3d[:, None], other.labels_3d[:, None]]
        wanted_rows = np.concatenate(columns, 1)
        rows = np.concatenate(
            [ours.boxes, ours.velocities, ours.scores[:, None], ours.labels[:, None]], 1
        )
        # By place, because rounding orders equal scores.
        rows, wanted_rows = (r[np.argsort(r[:, 0])] for r in (rows, wanted_rows))
        np.testing.assert_allclose(rows, wanted_rows, rtol=1e-4, atol=1e-4)
