"""CenterPoint by itself: names, shapes, pillars, boxes."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bev_data import InputError
from bevfusion.centerpoint import (
    PILLAR_CONFIGS,
    VOXEL_CONFIGS,
    CenterHeadConfig,
    CenterPointConfig,
    build_centerpoint,
    decode,
    example_voxels,
)
from bevfusion.model import DecoderConfig, load_state_dict, random_weights

EVERY = {
    **{f"voxels {size}": config for size, config in VOXEL_CONFIGS.items()},
    **{f"pillars {size}": config for size, config in PILLAR_CONFIGS.items()},
}
TINY = {"voxels": VOXEL_CONFIGS["tiny"], "pillars": PILLAR_CONFIGS["tiny"]}


@pytest.mark.parametrize("name", EVERY)
def test_sizes_fit_each_other_and_parts_are_told(name: str) -> None:
    config = EVERY[name]
    with torch.device("meta"):
        model = build_centerpoint(config)
    assert model.parts == ("lidar", "decoder", "head")
    assert not set(model.paths_outside(("lidar", "decoder"))) ^ {"pts_bbox_head"}
    held = {path for paths in model.part_paths.values() for path in paths}
    assert {name.partition(".")[0] for name in model.state_dict()} <= held


@pytest.mark.parametrize("kind", TINY)
def test_a_checkpoint_loads_by_its_own_names(kind: str) -> None:
    config = TINY[kind]
    one, other = build_centerpoint(config), build_centerpoint(config)
    batch = example_voxels(config)
    wanted = random_weights(one, *batch, seed=1)
    report = load_state_dict(
        other, one.state_dict(), layout="auto" if kind == "pillars" else "KRSC"
    )
    assert len(report.loaded) == len(one.state_dict())
    with torch.no_grad():
        made = other(*batch)
    assert all(torch.equal(made[name], value) for name, value in wanted.items())
    state = one.state_dict()
    state["pts_neck.deblocks.9.0.weight"] = state.pop("pts_neck.deblocks.0.0.weight")
    with pytest.raises(InputError, match=r"unexpected: pts_neck\.deblocks\.9"):
        load_state_dict(other, state, layout="KRSC")


@pytest.mark.parametrize("kind", TINY)
def test_two_frames_are_two_batches_of_one(kind: str) -> None:
    config = TINY[kind]
    model = build_centerpoint(config)
    generator = np.random.default_rng(0)
    clouds = [generator.uniform(-3, 2, (60, 5)).astype(np.float32) for _ in range(2)]
    made = [model.pts_voxel_layer(cloud, batch=i) for i, cloud in enumerate(clouds)]
    features, coords = (torch.cat([one[i] for one in made]) for i in range(2))
    both = random_weights(model, features, coords, 2)
    with torch.no_grad():
        for i, cloud in enumerate(clouds):
            alone = model(*model.pts_voxel_layer(cloud)[:2], 1)
            for name, value in alone.items():
                torch.testing.assert_close(both[name][i : i + 1], value, rtol=1e-4, atol=1e-4)


def test_pillars_hold_the_first_points_in_order() -> None:
    layer = build_centerpoint(PILLAR_CONFIGS["tiny"], ("lidar",)).pts_voxel_layer
    generator = np.random.default_rng(0)
    points = generator.uniform(-1, 1, (300, 5)).astype(np.float32)
    grouped, coords, count = layer.group(points)
    cells = np.floor((points[:, :2] + 54) / np.float32(0.675)).astype(int)
    for row, cell in enumerate(coords[:, 1:3].tolist()):
        inside = points[(cells == cell).all(1)][:20]
        assert count[row] == len(inside)
        np.testing.assert_array_equal(grouped[row, : len(inside)], inside)
        assert not grouped[row, len(inside) :].any()
    assert int(count.max()) == 20


def head_outputs(config: CenterHeadConfig) -> dict[str, Tensor]:
    x, y = config.map_size
    return {
        f"{name}_{task}": torch.full((1, channels, y, x), -9.0 if name == "heatmap" else 0.0)
        for task, classes in enumerate(config.tasks)
        for name, channels in (*config.branches, ("heatmap", len(classes)))
    }


def test_a_box_lies_where_its_cell_and_branches_say() -> None:
    config = CenterHeadConfig(map_size=(12, 10), voxel_size=(0.5, 0.25), origin=(-3.0, 1.0))
    outputs = head_outputs(config)
    outputs["heatmap_2"][0, 1, 4, 7] = 2.0  # trailer, y 4, x 7
    outputs["reg_2"][0, :, 4, 7] = torch.tensor([0.25, 0.5])
    outputs["height_2"][0, 0, 4, 7] = -1.5
    outputs["dim_2"][0, :, 4, 7] = torch.tensor([8.0, 2.5, 3.0]).log()
    outputs["rot_2"][0, :, 4, 7] = torch.tensor([math.sin(2.0), math.cos(2.0)])
    outputs["vel_2"][0, :, 4, 7] = torch.tensor([3.0, -1.0])
    (found,) = decode(outputs, config)
    wanted = [[7.25 * 4 - 3, 4.5 * 2 + 1, -1.5, 8, 2.5, 3, 2.0]]
    np.testing.assert_allclose(found.boxes, wanted, rtol=1e-6)
    assert config.classes[found.labels[0]] == "trailer"
    np.testing.assert_allclose(found.scores, [1 / (1 + math.exp(-2))], rtol=1e-6)
    np.testing.assert_allclose(found.velocities, [[3, -1]])


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"nms": "none"}, 3),
        ({"nms": "circle", "nms_radius": (0.5,) * 6}, 3),
        ({"nms": "circle", "nms_radius": (0.7,) * 6}, 1),
        ({"nms": "rotated", "nms_iou": 0.2}, 1),
        ({"nms": "rotated", "nms_iou": 0.6}, 3),
        ({"nms": "none", "peak_kernel": 3}, 1),
        ({"nms": "none", "max_boxes": 2}, 2),
        ({"nms": "none", "nms_boxes": 1}, 1),
    ],
)
def test_neighbours_are_one_object(changes: dict[str, object], left: int) -> None:
    config = replace(CenterHeadConfig(map_size=(12, 10)), **changes)
    outputs = head_outputs(config)
    for column, logit in ((5, 1.0), (6, 2.0), (7, 1.5)):
        outputs["heatmap_0"][0, 0, 5, column] = logit
        outputs["dim_0"][0, :, 5, column] = torch.tensor([2.0, 2.0, 2.0]).log()
    outputs["rot_0"][0, 1] = 1.0
    (found,) = decode(outputs, config)
    assert len(found.boxes) == left
    assert found.scores[0] == pytest.approx(1 / (1 + math.exp(-2.0)))


def test_a_head_without_velocities_finds_resting_boxes() -> None:
    config = replace(VOXEL_CONFIGS["waymo"].head, map_size=(6, 5))
    outputs = head_outputs(config)
    outputs["heatmap_0"][0, 2, 2, 2] = 3.0
    (found,) = decode(outputs, config)
    assert config.classes[found.labels[0]] == "CYCLIST"
    assert found.velocities.tolist() == [[0, 0]]


def test_what_cannot_be_is_refused() -> None:
    config = VOXEL_CONFIGS["tiny"]
    with pytest.raises(InputError, match="each reads the one before"):
        build_centerpoint(config, ("lidar", "head"))
    with pytest.raises(InputError, match="each reads the one before"):
        build_centerpoint(config, ("camera", "lidar"))
    wrong = replace(config, decoder=replace(config.decoder, in_channels=64))
    with pytest.raises(InputError, match=r"decoder\.in_channels is 64, .* make 128"):
        build_centerpoint(wrong)
    with pytest.raises(InputError, match="map_size"):
        build_centerpoint(replace(config, head=replace(config.head, map_size=(40, 40))))
    with pytest.raises(InputError, match=r"CenterHeadConfig\.nms "):
        CenterHeadConfig(nms="soft")
    outputs = head_outputs(config.head)
    del outputs["rot_3"]
    with pytest.raises(InputError, match="no 'rot_3'"):
        decode(outputs, config.head)
    outputs = head_outputs(replace(config.head, map_size=(8, 8)))
    with pytest.raises(InputError, match=r"reg_0 must be \[batch, 2, 80, 80\]"):
        decode(outputs, config.head)


def test_a_pyramid_of_three_scales_has_one_size() -> None:
    decoder = DecoderConfig(8, (0, 0, 0), (4, 4, 4), (2, 2, 2), (3, 3, 3), (0.5, 1, 2))
    config = CenterPointConfig(
        "own",
        replace(PILLAR_CONFIGS["tiny"].lidar, feat_channels=(16, 8)),  # type: ignore[type-var]
        decoder,
        replace(PILLAR_CONFIGS["tiny"].head, in_channels=9, out_size_factor=4, map_size=(40, 40)),
    )
    model = build_centerpoint(config)
    assert model(*example_voxels(config))["reg_0"].shape == (1, 2, 40, 40)
    assert type(model.pts_neck.deblocks[0][0]) is torch.nn.Conv2d
