"""The whole model's state dict: mit-bevfusion's names and shapes, parts, and other detectors."""

from __future__ import annotations

import re

import pytest
import torch
from mit_state_dict import mit_shapes, mit_state_dict
from torch import Tensor

from bev_data import InputError
from bevfusion.model import CONFIGS, BEVFusion, build_model, load_state_dict

GEOMETRY = ("dx", "bx", "nx", "frustum")


BACKBONES = {"nuscenes": "resnet50", "nuscenes-swint": "swint"}


@pytest.fixture(scope="module")
def model() -> BEVFusion:
    return build_model(CONFIGS["nuscenes"])


@pytest.fixture
def state() -> dict[str, Tensor]:
    return mit_state_dict()


def stored_shape(tensor: Tensor) -> tuple[int, ...]:
    """Shape as mit-bevfusion stores it: sparse weights with their output channels last."""
    shape = tuple(tensor.shape)
    return (*shape[1:4], shape[4], shape[0]) if tensor.ndim == 5 else shape


@pytest.mark.parametrize(("config", "backbone"), BACKBONES.items())
def test_the_detectors_state_dict_loads_without_a_change(config: str, backbone: str) -> None:
    model, state = build_model(CONFIGS[config]), mit_state_dict(backbone)
    shapes = {name: stored_shape(t) for name, t in model.state_dict().items()}
    assert shapes == mit_shapes(backbone)
    report = load_state_dict(model, state)
    assert set(report.loaded) == set(state)
    assert report.not_used == ()
    assert report.layout == "RSCK"
    for name, tensor in model.state_dict().items():
        wanted = state[name]
        if name.rpartition(".")[2] in (*GEOMETRY, "relative_position_index"):
            torch.testing.assert_close(tensor, wanted)
        else:
            assert tensor.eq(wanted.flatten()[0] if wanted.ndim else wanted).all(), name


def test_parts_not_built_are_not_used(state: dict[str, Tensor]) -> None:
    model = build_model(CONFIGS["nuscenes"], ("lidar", "decoder"))
    report = load_state_dict(model, state)
    roots = {name.split(".")[0] for name in report.loaded}
    assert roots == {"encoders", "decoder"}
    assert {".".join(name.split(".")[:2]) for name in report.not_used} >= {
        "encoders.camera",
        "heads.object",
    }
    assert len(report.loaded) + len(report.not_used) == len(state)
    camera = build_model(CONFIGS["nuscenes"], ("camera",))
    assert load_state_dict(camera, state).layout == ""


def test_what_is_wrong_in_every_part_is_in_one_message(
    model: BEVFusion, state: dict[str, Tensor]
) -> None:
    before = {name: t.clone() for name, t in model.state_dict().items()}
    del state["encoders.camera.neck.fpn_convs.1.bn.bias"]
    del state["heads.object.decoder.0.norm2.weight"]
    state["heads.object.decoder.1.norm2.weight"] = torch.ones(128)
    state["fuser.0.weight"] = torch.ones(256, 335, 3, 3)
    state["decoder.neck.deblocks.1.1.running_var"] = torch.full((256,), float("inf"))
    state["encoders.lidar.backbone.conv_out.0.weight"] = torch.ones(3, 1, 1, 128, 128)
    with pytest.raises(InputError) as caught:
        load_state_dict(model, state)
    message = str(caught.value)
    for line in (
        "missing: encoders.camera.neck.fpn_convs.1.bn.bias",
        "missing: heads.object.decoder.0.norm2.weight",
        "unexpected: heads.object.decoder.1.norm2.weight",
        "misshapen: fuser.0.weight should be [256, 336, 3, 3], is [256, 335, 3, 3]",
        "not finite: decoder.neck.deblocks.1.1.running_var",
        "misshapen: encoders.lidar.backbone.conv_out.0.weight should be [1, 1, 3, 128, 128] (RSCK)",
        "6 problems",
    ):
        assert line in message
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_geometry_of_another_configuration_is_refused(
    model: BEVFusion, state: dict[str, Tensor]
) -> None:
    state["encoders.camera.vtransform.dx"] = torch.tensor([0.4, 0.4, 20.0])
    state["encoders.camera.vtransform.frustum"] = state["encoders.camera.vtransform.frustum"] + 0.25
    with pytest.raises(InputError) as caught:
        load_state_dict(model, state)
    message = str(caught.value)
    assert "another geometry: encoders.camera.vtransform.dx is [0.4" in message
    assert "another geometry: encoders.camera.vtransform.frustum" in message
    assert "use that" not in message


def test_the_windows_index_may_be_absent_but_not_another() -> None:
    model, state = build_model(CONFIGS["nuscenes-swint"], ("camera",)), mit_state_dict("swint")
    names = [name for name in state if name.endswith("relative_position_index")]
    other = {**state, names[3]: state[names[3]].T}
    with pytest.raises(InputError) as caught:
        load_state_dict(model, other)
    assert f"another geometry: {names[3]}" in str(caught.value)
    assert "1 problem:" in str(caught.value)
    without = {name: t for name, t in state.items() if name not in names}
    report = load_state_dict(model, without)
    assert len(report.loaded) == len(model.state_dict()) - 12
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in names)


def test_a_checkpoint_with_another_backbone_names_its_config(model: BEVFusion) -> None:
    with pytest.raises(InputError, match=r"is a Swin transformer; use .*--config nuscenes-swint"):
        load_state_dict(model, mit_state_dict("swint"))
    swin = build_model(CONFIGS["nuscenes-swint"])
    with pytest.raises(InputError, match=r"is a ResNet; use .*--config nuscenes,"):
        load_state_dict(swin, mit_state_dict())
    damaged = mit_state_dict("swint")
    del damaged["encoders.camera.backbone.norm2.bias"]
    with pytest.raises(InputError) as caught:
        load_state_dict(swin, damaged)
    assert "Swin" not in str(caught.value)  # it is the model's own kind


def test_a_checkpoint_of_another_config_is_named(state: dict[str, Tensor]) -> None:
    with pytest.raises(InputError, match="of the sizes of config 'nuscenes': use that") as caught:
        load_state_dict(build_model(CONFIGS["tiny"]), state)
    *_, last = lines = str(caught.value).splitlines()
    assert re.search(rf"; {10 + int(last.split()[1])} problems:$", lines[0])
    assert len(lines) == 12
    own = build_model(CONFIGS["tiny"]).state_dict()
    with pytest.raises(InputError, match="of the sizes of config 'tiny': use that"):
        load_state_dict(build_model(CONFIGS["nuscenes"], ("camera",)), own)


OTHERS = {
    "encoders.camera.backbone.stages.0.blocks.0.attn.w_msa.qkv.weight": "Swin transformer",
    "encoders.camera.backbone.patch_embed.proj.weight": "neither a ResNet nor a Swin",
    "heads.object.task_heads.0.reg.0.conv.weight": "CenterPoint",
    "encoders.lidar.backbone.pts_voxel_encoder.pfn_layers.0.linear.weight": "PointPillars",
    "pts_middle_encoder.conv_input.0.weight": "holds lidar and nothing of camera",
    "vtransform.dtransform.0.weight": "holds camera and nothing of lidar",
    "fuser.0._input_quantizer._amax": "with quantizers",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_detectors_are_recognised(
    model: BEVFusion, state: dict[str, Tensor], name: str
) -> None:
    ours = name.startswith(("encoders", "heads", "fuser"))
    replaced = ".".join(name.split(".")[: 3 if ours else 0])
    other = {key: t for key, t in state.items() if not key.startswith(replaced)}
    with pytest.raises(InputError, match=OTHERS[name]):
        load_state_dict(model, {**other, name: torch.ones(2)})


def test_what_other_parts_are_does_not_matter(state: dict[str, Tensor]) -> None:
    swin = {n: t for n, t in state.items() if not n.startswith("encoders.camera")}
    swin["encoders.camera.backbone.stages.0.blocks.0.attn.w_msa.qkv.weight"] = torch.ones(2)
    model = build_model(CONFIGS["nuscenes"], ("lidar", "decoder", "head"))
    assert len(load_state_dict(model, swin).not_used) == 7
    del swin["encoders.lidar.backbone.conv_out.1.bias"]
    with pytest.raises(InputError) as caught:
        load_state_dict(model, swin)
    assert "Swin" not in str(caught.value)


def test_parts_that_the_checkpoint_lacks_are_named(
    model: BEVFusion, state: dict[str, Tensor]
) -> None:
    lidar = {n: t for n, t in state.items() if not n.startswith(("encoders.camera", "fuser"))}
    with pytest.raises(InputError) as caught:
        load_state_dict(model, lidar)
    message = str(caught.value)
    assert "holds lidar, decoder, head and nothing of camera, fuser: give one that" in message
    assert "missing: every entry of encoders.camera" in message
    assert "2 problems" in message
