"""Camera, LiDAR and head mean the same place by the same cell; contradicting sizes are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bev_data import InputError
from bevfusion.model import CONFIGS, BEVFusionConfig, build_model
from bevfusion.model.head import TransFusionHead

TINY = CONFIGS["tiny"]
PLACE = (31.0, -12.5, -1.0)  # metres, off every diagonal
LOW = -54.0
ROWS = {"center": 2, "height": 1, "dim": 3, "rot": 2, "vel": 2, "heatmap": 10}


def cell_of(place: tuple[float, float, float], config: BEVFusionConfig) -> tuple[int, int]:
    """Cell along x and y of the map, from the extent of 108 m alone."""
    size = 108 / config.head.map_size[0]
    return int((place[0] - LOW) // size), int((place[1] - LOW) // size)


def test_a_voxel_is_seen_at_its_place() -> None:
    torch.manual_seed(0)
    model = build_model(TINY, ("lidar",))
    point = torch.tensor([[*PLACE, 0.5, 0.0]])
    features, coords, _ = model.lidar["voxelize"](point.numpy())
    with torch.no_grad():
        seen = model(features, coords, 1)[0].abs().sum(0)
    x, y = seen.nonzero().float().mean(0).tolist()
    wanted = cell_of(PLACE, TINY)
    assert abs(x - wanted[0]) < 1.5
    assert abs(y - wanted[1]) < 1.5


@pytest.mark.parametrize("name", CONFIGS)
def test_a_frustum_point_is_pooled_at_its_place(name: str) -> None:
    """A camera at the LiDAR looks along −y; the frustum point nearest PLACE is in its cell."""
    config = CONFIGS[name]
    camera = dataclasses.replace(config.camera, depths=(1, 1, 1, 1), width=32)
    model = build_model(dataclasses.replace(config, camera=camera), ("camera",))
    height, width = camera.image_size
    # Right is −x, down is −z, ahead is −y.
    turn = torch.tensor([[-1.0, 0, 0], [0, 0, -1], [0, -1, 0]], dtype=torch.float64)
    pose = torch.eye(4, dtype=torch.float64)
    pose[:3, :3] = turn
    ahead = turn @ torch.tensor(PLACE, dtype=torch.float64)
    right, down, depth = ahead.tolist()
    bins, rows, columns = len(torch.arange(*camera.dbound)), *camera.feature_size
    step = (config.camera.dbound[2], (height - 1) / (rows - 1), (width - 1) / (columns - 1))
    at = (round((depth - 1) / step[0]), rows // 2, columns // 3)
    depth = 1 + at[0] * step[0]
    # A camera whose pixel at that row and column shows the place, at the bin's depth.
    intrinsics = torch.eye(3, dtype=torch.float64)
    intrinsics[0, 0] = intrinsics[1, 1] = 20.0
    intrinsics[0, 2] = at[2] * step[2] - 20.0 * right / depth
    intrinsics[1, 2] = at[1] * step[1] - 20.0 * down / depth
    unchanged = torch.eye(3, dtype=torch.float64)
    geometry = (t[None, None] for t in (intrinsics, pose, unchanged))
    cells = model.camera["vtransform"].cells(*geometry).view(bins, rows, columns)
    across = round((camera.ybound[1] - camera.ybound[0]) / camera.ybound[2])
    flat = int(cells[at])
    moved = (PLACE[0], -depth, PLACE[2])
    found = (flat // across // camera.downsample, flat % across // camera.downsample)
    assert found == cell_of(moved, config)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_head_puts_a_box_at_the_place(name: str) -> None:
    config = CONFIGS[name]
    x, y = cell_of(PLACE, config)
    size = 108 / config.head.map_size[0]
    outputs = {key: torch.zeros(1, rows, 1) for key, rows in ROWS.items()}
    outputs["center"][0, :, 0] = torch.tensor([x + 0.5, y + 0.5])
    outputs["query_heatmap_score"] = torch.ones(1, 10, 1)
    outputs["query_labels"] = torch.zeros(1, 1, dtype=torch.int64)
    (found,) = TransFusionHead(config.head).decode(outputs)
    assert abs(float(found.boxes[0, 0]) - PLACE[0]) <= size / 2
    assert abs(float(found.boxes[0, 1]) - PLACE[1]) <= size / 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"fuser": {"in_channels": (16, 64)}}, r"fuser.in_channels is \(16, 64\), .* \(16, 128\)"),
        ({"camera": {"downsample": 1}}, r"camera's map is \(80, 80\), the LiDAR's \(40, 40\)"),
        ({"decoder": {"in_channels": 48}}, "decoder.in_channels is 48, the fused map 32"),
        ({"head": {"in_channels": 32}}, "head.in_channels is 32, the decoder's map 64"),
        ({"head": {"map_size": (45, 45)}}, r"head.map_size is \(45, 45\)"),
        ({"decoder": {"strides": (1, 3)}}, r"\(40, 40\) cells does not divide by .*multiple of 3"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(change: dict, why: str) -> None:
    parts = {part: dataclasses.replace(getattr(TINY, part), **how) for part, how in change.items()}
    config = dataclasses.replace(TINY, **parts)
    with pytest.raises(InputError, match=why):
        build_model(config)


def test_sizes_of_parts_that_are_not_built_do_not_matter() -> None:
    wrong = dataclasses.replace(TINY, head=dataclasses.replace(TINY.head, in_channels=32))
    assert build_model(wrong, ("camera", "decoder")).parts == ("camera", "decoder")
