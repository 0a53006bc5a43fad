"""The head's state dict against mit-bevfusion's names and shapes, and its settings."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bev_data import InputError
from bevfusion.model.head import HeadConfig, TransFusionHead

NUSCENES = HeadConfig()
SMALL = HeadConfig(
    in_channels=64,
    hidden_channels=32,
    branch_channels=32,
    ffn_channels=64,
    num_heads=4,
    num_queries=50,
    map_size=(45, 45),
    voxel_size=(0.3, 0.3),
)


def expected_shapes() -> dict[str, tuple[int, ...]]:
    """Every entry of `heads.object` in mit-bevfusion's nuScenes checkpoints, by hand."""
    shapes: dict[str, tuple[int, ...]] = {
        "shared_conv.weight": (128, 512, 3, 3),
        "shared_conv.bias": (128,),
        "heatmap_head.0.conv.weight": (128, 128, 3, 3),
        "heatmap_head.1.weight": (10, 128, 3, 3),
        "heatmap_head.1.bias": (10,),
        "class_encoding.weight": (128, 10, 1),
        "class_encoding.bias": (128,),
        "decoder.0.linear1.weight": (256, 128),
        "decoder.0.linear1.bias": (256,),
        "decoder.0.linear2.weight": (128, 256),
        "decoder.0.linear2.bias": (128,),
    }

    def norm(path: str, width: int) -> None:
        for leaf in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{path}.{leaf}"] = (width,)
        shapes[f"{path}.num_batches_tracked"] = ()

    norm("heatmap_head.0.bn", 128)
    for name in ("self_attn", "multihead_attn"):
        shapes[f"decoder.0.{name}.in_proj_weight"] = (384, 128)
        shapes[f"decoder.0.{name}.in_proj_bias"] = (384,)
        shapes[f"decoder.0.{name}.out_proj.weight"] = (128, 128)
        shapes[f"decoder.0.{name}.out_proj.bias"] = (128,)
    for name in ("norm1", "norm2", "norm3"):
        shapes[f"decoder.0.{name}.weight"] = (128,)
        shapes[f"decoder.0.{name}.bias"] = (128,)
    for name in ("self_posembed", "cross_posembed"):
        path = f"decoder.0.{name}.position_embedding_head"
        shapes[f"{path}.0.weight"] = (128, 2, 1)
        shapes[f"{path}.0.bias"] = (128,)
        norm(f"{path}.1", 128)
        shapes[f"{path}.3.weight"] = (128, 128, 1)
        shapes[f"{path}.3.bias"] = (128,)
    outputs = {"center": 2, "height": 1, "dim": 3, "rot": 2, "vel": 2, "heatmap": 10}
    for name, rows in outputs.items():
        path = f"prediction_heads.0.{name}"
        shapes[f"{path}.0.conv.weight"] = (64, 128, 1)
        norm(f"{path}.0.bn", 64)
        shapes[f"{path}.1.weight"] = (rows, 64, 1)
        shapes[f"{path}.1.bias"] = (rows,)
    return shapes


def test_state_dict_has_mit_bevfusions_names_and_shapes() -> None:
    head = TransFusionHead(NUSCENES)
    assert {name: tuple(t.shape) for name, t in head.state_dict().items()} == expected_shapes()


def test_cell_positions_are_no_entries_of_the_state_dict_but_follow_the_module() -> None:
    head = TransFusionHead(SMALL)
    assert "bev_pos" in dict(head.named_buffers())
    assert head.double().bev_pos.dtype == torch.float64
    # Cell 1 is the second along y: x is the slow axis, as in the map [x, y].
    assert head.bev_pos[0, 1].tolist() == [0.5, 1.5]
    assert head.bev_pos[0, 45].tolist() == [1.5, 0.5]


def test_constants_of_the_layers_are_mit_bevfusions() -> None:
    head = TransFusionHead(NUSCENES)
    norms = [m for m in head.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    assert {(m.eps, m.momentum) for m in norms} == {(1e-5, 0.1)}
    assert head.decoder[0].self_attn.num_heads == 8
    assert head.decoder[0].multihead_attn.num_heads == 8


def test_nuscenes_settings_are_mit_bevfusions() -> None:
    config = NUSCENES
    assert (config.num_queries, config.map_size, config.num_classes) == (200, (180, 180), 10)
    assert (config.classes[8], config.classes[9]) == config.point_classes
    assert (config.nms, config.score_threshold) == ("none", 0.0)
    spans = [c * n for c, n in zip(config.cell_size, config.map_size, strict=True)]
    assert spans == pytest.approx([108.0, 108.0])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_heads": 5}, "num_heads"),
        ({"num_queries": 0}, "num_queries"),
        ({"num_queries": 10**9}, "num_queries"),
        ({"nms_kernel": 2}, "nms_kernel"),
        ({"nms": "soft"}, "nms"),
        ({"score_threshold": 1.5}, "score_threshold"),
        ({"point_classes": ("tram",)}, "point_classes"),
        ({"classes": ("car", "car")}, "classes"),
    ],
)
def test_a_setting_out_of_range_is_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=rf"HeadConfig\.{named} must be"):
        dataclasses.replace(HeadConfig(), **changes)


@pytest.mark.parametrize("shape", [(1, 64, 45, 44), (1, 32, 45, 45), (64, 45, 45)])
def test_a_map_of_another_size_is_named(shape: tuple[int, ...]) -> None:
    head = TransFusionHead(SMALL).eval()
    with pytest.raises(InputError, match=r"\[batch, 64, 45, 45\].*" + str(shape[-1])):
        head(torch.zeros(shape))
