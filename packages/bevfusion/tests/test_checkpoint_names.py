"""Checkpoints of OpenPCDet, det3d and mmdetection3d: every entry, both ways, and what it means.

The lists of names are written by hand from these projects' modules; values go the other way than
the loader takes them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import pytest
import torch
from mit_state_dict import mit_state_dict
from torch import Tensor, nn
from torch.nn import functional as F

from bev_data import InputError
from bevfusion.centerpoint import PILLAR_CONFIGS, VOXEL_CONFIGS, build_centerpoint
from bevfusion.model import (
    CONFIGS,
    NAMINGS,
    CameraConfig,
    build_model,
    example_batch,
    load_state_dict,
    load_weights,
)

BN = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
STAGE = "pts_middle_encoder.encoder_layers.encoder_layer"
CONFIGS_OF = {"voxels": VOXEL_CONFIGS["tiny"], "pillars": PILLAR_CONFIGS["tiny"]}
Pair = tuple[str, str]
"""A name in the file, and the one here."""


def both(theirs: str, ours: str, norm: tuple[str, str] | None = None) -> Iterator[Pair]:
    """A convolution's weight and the batch norm behind it."""
    yield f"{theirs}.weight", f"{ours}.weight"
    if norm:
        yield from ((f"{norm[0]}.{leaf}", f"{norm[1]}.{leaf}") for leaf in BN)


def blocks(theirs: str, ours: str) -> Iterator[Pair]:
    for i in (1, 2):
        norm = f"{theirs}.bn{i}", f"{ours}.bn{i}"
        yield from both(f"{theirs}.conv{i}", f"{ours}.conv{i}", norm)
        yield f"{theirs}.conv{i}.bias", f"{ours}.conv{i}.bias"


def unit(theirs: str, ours: str, first: int = 0) -> Iterator[Pair]:
    """Convolution and batch norm by their numbers in a Sequential."""
    norm = f"{theirs}.{first + 1}", f"{ours}.1"
    yield from both(f"{theirs}.{first}", f"{ours}.0", norm)


def decoder(theirs: str, config) -> Iterator[Pair]:
    """RPN's and BaseBEVBackbone's blocks begin with a ZeroPad2d."""
    for stage, layers in enumerate(config.decoder.layers):
        for i in range(0, 3 * (layers + 1), 3):
            names = [f"{theirs}.blocks.{stage}.{i + k}" for k in (1, 2)]
            ours = [f"pts_backbone.blocks.{stage}.{i + k}" for k in (0, 1)]
            yield from both(names[0], ours[0], (names[1], ours[1]))
        yield from unit(f"{theirs}.deblocks.{stage}", f"pts_neck.deblocks.{stage}")


def lidar(config, path: str, reader: str, down: str, out: str) -> Iterator[Pair]:
    """Of det3d, whose stages are one Sequential each, `down` is empty."""
    if not hasattr(config.lidar, "encoder_channels"):
        for layer in range(len(config.lidar.feat_channels)):
            theirs, ours = f"{reader}.pfn_layers.{layer}", f"pts_voxel_encoder.pfn_layers.{layer}"
            norm = f"{theirs}.norm", f"{ours}.norm"
            yield from both(f"{theirs}.linear", f"{ours}.linear", norm)
        return
    yield from unit(f"{path}.conv_input", "pts_middle_encoder.conv_input")
    for stage in (1, 2, 3, 4):
        first = 0
        if stage > 1:
            first = 1 if down else 3
            yield from unit(f"{path}.conv{stage}{down}", f"{STAGE}{stage - 1}.2")
        for i in (0, 1):
            yield from blocks(f"{path}.conv{stage}.{first + i}", f"{STAGE}{stage}.{i}")
    yield from unit(f"{path}.{out}", "pts_middle_encoder.conv_out")


def head(config, path: str, tasks: str, block: str, last: str, names: dict) -> Iterator[Pair]:
    def unit_with_bias(theirs: str, ours: str) -> Iterator[Pair]:
        yield from both(f"{theirs}.0", f"{ours}.conv", (f"{theirs}.1", f"{ours}.bn"))
        yield f"{theirs}.0.bias", f"{ours}.conv.bias"

    yield from unit_with_bias(f"{path}.shared_conv", "pts_bbox_head.shared_conv")
    for task in range(len(config.head.tasks)):
        for name in (*dict(config.head.branches), "heatmap"):
            theirs = f"{path}.{tasks}.{task}.{names.get(name, name)}"
            ours = f"pts_bbox_head.task_heads.{task}.{name}"
            yield from unit_with_bias(f"{theirs}{block}", f"{ours}.0")
            yield from ((f"{theirs}.{last}.{x}", f"{ours}.1.{x}") for x in ("weight", "bias"))


def openpcdet(config) -> Iterator[Pair]:
    yield from lidar(config, "backbone_3d", "vfe", ".0", "conv_out")
    yield from decoder("backbone_2d", config)
    names = {"reg": "center", "height": "center_z", "heatmap": "hm"}
    yield from head(config, "dense_head", "heads_list", ".0", "1", names)


def det3d(config) -> Iterator[Pair]:
    yield from lidar(config, "backbone", "reader", "", "extra_conv")
    yield from decoder("neck", config)
    yield from head(config, "bbox_head", "tasks", "", "3", {"heatmap": "hm"})


def random_state(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        n: torch.rand(t.shape, generator=generator) + 0.5 if t.is_floating_point() else t
        for n, t in model.state_dict().items()
    }


def stored(kind: str, own: dict[str, Tensor], config) -> dict[str, Tensor]:
    """The file of another project that means what `own` means here."""
    file: dict[str, Tensor] = {}
    names = list({"openpcdet": openpcdet, "det3d": det3d}[kind](config))
    if kind == "det3d" and "pts_voxel_encoder.pfn_layers.0.linear.weight" in own:
        # A point's offset from the pillar's centre in z, which det3d does not have.
        own["pts_voxel_encoder.pfn_layers.0.linear.weight"][:, -1] = 0
    for their, ours in names:
        if ours in own:
            file[their] = _value(kind, ours, own[ours])
    theirs = {ours: their for their, ours in names}
    for their, ours in names:
        if ours not in own:  # the bias of a convolution before a batch norm
            begin, _, number = ours.removesuffix(".bias").rpartition("conv")
            mean = theirs[f"{begin}bn{number}.running_mean"]
            file[their] = torch.linspace(-1, 1, len(file[mean]))
            file[mean] = file[mean] + file[their]
    return file


def _value(kind: str, ours: str, value: Tensor) -> Tensor:
    if kind == "openpcdet" and "deblocks" in ours and value.shape[2:] == (1, 1):
        return value.transpose(0, 1).contiguous()
    if ".rot.1." in ours:
        return value[[1, 0]] * (1 if kind == "openpcdet" else -1)
    if ".dim.1." in ours and kind == "det3d":
        return value[[1, 0, 2]]
    if kind == "det3d" and ours.endswith("pfn_layers.0.linear.weight"):
        return value[:, :-1].clone()
    return value.clone()


@pytest.mark.parametrize("layout", ["KRSC", "RSCK"])
@pytest.mark.parametrize("form", CONFIGS_OF)
@pytest.mark.parametrize("kind", ["openpcdet", "det3d"])
def test_every_entry_of_centerpoint_both_ways(kind: str, form: str, layout: str) -> None:
    config = CONFIGS_OF[form]
    model = build_centerpoint(config)
    own = random_state(model)
    file = stored(kind, own, config)
    if layout == "RSCK":
        file = {n: t.permute(1, 2, 3, 4, 0) if t.ndim == 5 else t for n, t in file.items()}
    if kind == "openpcdet":
        file["global_step"] = torch.zeros(1)
    report = load_state_dict(model, file)
    assert report.names == kind
    assert set(report.loaded) == set(own)
    assert report.not_used == (("global_step",) if kind == "openpcdet" else ())
    assert report.layout == (layout if form == "voxels" else "")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, own[name], msg=name)
    assert f"names of {kind}" in str(report)
    assert "bias of the convolution subtracted" in str(report)


def last_layer(state: dict[str, Tensor], path: str, x: Tensor) -> Tensor:
    return F.conv2d(x, state[f"{path}.weight"], state[f"{path}.bias"], padding=1)[0]


@pytest.mark.parametrize(
    ("kind", "path", "their_yaw"),
    [
        ("openpcdet", "dense_head.heads_list.0.rot.1", lambda r: torch.atan2(r[1], r[0])),
        ("det3d", "bbox_head.tasks.0.rot.3", lambda r: -torch.atan2(r[0], r[1]) - math.pi / 2),
        (
            "mmdet3d-0",
            "pts_bbox_head.task_heads.0.rot.1",
            lambda r: -torch.atan2(r[0], r[1]) - math.pi / 2,
        ),
    ],
)
def test_yaw_and_size_mean_the_same(kind, path, their_yaw) -> None:
    generator = torch.Generator().manual_seed(3)
    state = {
        f"{p}.{leaf}": torch.randn(shape, generator=generator)
        for p, rows in ((path, 2), (path.replace("rot", "dim"), 3))
        for leaf, shape in (("weight", (rows, 16, 3, 3)), ("bias", (rows,)))
    }
    x = torch.randn(1, 16, 6, 6, generator=generator)
    model = build_centerpoint(CONFIGS_OF["voxels"])
    file = random_state(model)
    if kind != "mmdet3d-0":
        file = stored(kind, file, CONFIGS_OF["voxels"])
    load_state_dict(model, {**file, **state}, names=kind)
    own = model.state_dict()
    rot = last_layer(own, "pts_bbox_head.task_heads.0.rot.1", x)
    turn = torch.atan2(rot[0], rot[1]) - their_yaw(last_layer(state, path, x))
    assert torch.sin(turn / 2).abs().max() < 1e-5
    dim = last_layer(own, "pts_bbox_head.task_heads.0.dim.1", x)
    their_dim = last_layer(state, path.replace("rot", "dim"), x)
    width_first = kind != "openpcdet"
    torch.testing.assert_close(dim, their_dim[[1, 0, 2]] if width_first else their_dim)


def test_a_bias_before_a_batch_norm_keeps_the_function() -> None:
    model = build_centerpoint(CONFIGS_OF["pillars"])
    file = stored("det3d", random_state(model), CONFIGS_OF["pillars"])
    load_state_dict(model, file)
    unit = model.pts_bbox_head.shared_conv
    x = torch.randn(1, 64, 8, 8, generator=torch.Generator().manual_seed(1))
    at = "bbox_head.shared_conv"
    y = F.conv2d(x, file[f"{at}.0.weight"], file[f"{at}.0.bias"], padding=1)
    norm = [file[f"{at}.1.{leaf}"] for leaf in ("running_mean", "running_var", "weight", "bias")]
    y = F.relu(F.batch_norm(y, *norm, eps=unit.bn.eps))
    torch.testing.assert_close(unit(x), y, rtol=1e-4, atol=1e-4)


# mmdetection3d --------------------------------------------------------------------------------

# mit-bevfusion's name, mmdetection3d's: in BEVFusion of its `projects`.
BEVFUSION = {
    "encoders.camera.backbone.": "img_backbone.",
    "encoders.camera.neck.": "img_neck.",
    "encoders.camera.vtransform.": "view_transform.",
    "encoders.lidar.backbone.": "pts_middle_encoder.",
    "fuser.": "fusion_layer.",
    "decoder.backbone.": "pts_backbone.",
    "decoder.neck.": "pts_neck.",
    "heads.object.": "bbox_head.",
    "decoder.0.self_attn.": "decoder.0.self_attn.attn.",
    "decoder.0.multihead_attn.": "decoder.0.cross_attn.attn.",
    "decoder.0.linear1.": "decoder.0.ffn.layers.0.0.",
    "decoder.0.linear2.": "decoder.0.ffn.layers.1.",
    "decoder.0.norm1.": "decoder.0.norms.0.",
    "decoder.0.norm2.": "decoder.0.norms.1.",
    "decoder.0.norm3.": "decoder.0.norms.2.",
}


def mmdet3d_name(name: str) -> str:
    for ours, theirs in BEVFUSION.items():
        if ours.startswith("decoder.0") or name.startswith(ours):
            name = name.replace(ours, theirs, 1)
    return name


@pytest.mark.parametrize(
    ("config", "backbone"),
    [("nuscenes-mmdet3d", "resnet50"), ("nuscenes-swint-mmdet3d", "swint")],
)
def test_bevfusion_of_mmdetection3d(config: str, backbone: str) -> None:
    mit = mit_state_dict(backbone)
    file = {mmdet3d_name(n): t for n, t in mit.items()}
    assert "bbox_head.decoder.0.ffn.layers.0.0.weight" in file
    model = build_model(CONFIGS[config])
    report = load_state_dict(model, file)
    assert report.names == "mmdet3d-bevfusion"
    assert set(report.loaded) == set(mit) == set(model.state_dict())
    assert sorted(report.converted) == [
        f"heads.object.prediction_heads.0.{branch}.1.{leaf}"
        for branch in ("dim", "rot")
        for leaf in ("bias", "weight")
    ]
    lidar = build_model(CONFIGS["nuscenes"], ("lidar", "decoder"))
    report = load_state_dict(lidar, file)
    assert len(report.not_used) == len(file) - len(report.loaded)
    assert "fusion_layer.0.weight" in report.not_used


def test_the_height_of_mmdetection3d_s_head_is_asked_for() -> None:
    file = {mmdet3d_name(n): t for n, t in mit_state_dict().items()}
    parts = ("lidar", "decoder", "head")
    with pytest.raises(
        InputError, match=r"predicts the centre of boxes.*--config nuscenes-mmdet3d"
    ):
        load_state_dict(build_model(CONFIGS["nuscenes"], parts), file)
    swin = {mmdet3d_name(n): t for n, t in mit_state_dict("swint").items()}
    with pytest.raises(InputError, match=r"--config nuscenes-swint-mmdet3d"):
        load_state_dict(build_model(CONFIGS["nuscenes-swint"], parts), swin)
    with pytest.raises(InputError, match=r"predicts the top of boxes.*--config nuscenes"):
        load_state_dict(build_model(CONFIGS["nuscenes-mmdet3d"], parts), mit_state_dict())


def test_heights_top_and_centre_decode_to_one_box() -> None:
    from bevfusion.training import Targets, decode_boxes, encode_boxes

    config = CONFIGS["nuscenes"].head
    box = torch.tensor([[3.0, -4.0, 0.5, 4.0, 2.0, 1.5, 0.3]]).numpy()
    target = Targets(box, box[:, :2] * 0, box[:, 0].astype(int))
    for height, z in (("top", 1.25), ("centre", 0.5)):
        head = dataclasses.replace(config, height=height)
        code = encode_boxes(target, head)
        assert code[0, 2] == pytest.approx(z)
        assert decode_boxes(code, head) == pytest.approx(box, abs=1e-5)


def test_files_of_mmdetection3d_before_1_0_have_another_box(tmp_path) -> None:
    model = build_centerpoint(CONFIGS_OF["pillars"])
    own = random_state(model)
    name = "pts_bbox_head.task_heads.3.rot.1.bias"
    for version, wanted in (("1.4.0", own[name]), ("0.17.1", -own[name][[1, 0]])):
        torch.save({"state_dict": own, "meta": {"mmdet3d_version": version}}, tmp_path / "c.pth")
        report = load_weights(model, tmp_path / "c.pth")
        assert report.names == ("own" if version == "1.4.0" else "mmdet3d-0")
        assert torch.equal(model.state_dict()[name], wanted)
        assert report.checkpoint.facts["meta.mmdet3d_version"] == version


# BEVFusion of OpenPCDet -------------------------------------------------------------------------


def pcdet_bevfusion_name(name: str) -> str:
    stage = re.match(r"encoders\.lidar\.backbone\.encoder_layers\.encoder_layer(\d)\.(\d)\.", name)
    if stage:
        i, j = int(stage[1]), int(stage[2])
        place = f"conv{i + 1}.0." if j == 2 else f"conv{i}.{j + (i > 1)}."
        return f"backbone_3d.{place}{name[stage.end() :]}"
    if block := re.match(r"decoder\.backbone\.blocks\.(\d)\.(\d+)\.", name):
        return f"backbone_2d.blocks.{block[1]}.{int(block[2]) + 1}.{name[block.end() :]}"
    if head := re.match(r"heads\.object\.prediction_heads\.0\.(\w+)\.(0\.conv|0\.bn|1)\.", name):
        place = {"0.conv": "0.0", "0.bn": "0.1", "1": "1"}[head[2]]
        return f"dense_head.prediction_head.{head[1]}.{place}.{name[head.end() :]}"
    for ours, theirs in {
        "encoders.camera.backbone.": "image_backbone.", "encoders.camera.neck.": "neck.",
        "encoders.camera.vtransform.": "vtransform.", "encoders.lidar.backbone.": "backbone_3d.",
        "fuser.": "fuser.conv.", "decoder.neck.": "backbone_2d.",
        "heads.object.decoder.0.": "dense_head.decoder.", "heads.object.": "dense_head.",
    }.items():  # fmt: skip
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    raise AssertionError(name)


def pcdet_bevfusion_value(name: str, value: Tensor) -> Tensor:
    if ".dim.1." in name:
        return value[[1, 0, 2]]
    if ".rot.1." in name:
        return -value[[1, 0]]
    if value.ndim == 5:  # [out, x, y, z, in]
        return value.transpose(1, 3)
    if value.ndim == 4 and not name.startswith("encoders.camera."):
        return value.transpose(2, 3)
    return value


SWIN = dataclasses.replace(CONFIGS["tiny"].camera, backbone="swin", width=32)


@pytest.mark.parametrize("camera", [CONFIGS["tiny"].camera, SWIN], ids=["resnet", "swin"])
def test_bevfusion_of_openpcdet(camera: CameraConfig) -> None:
    sizes = dataclasses.replace(CONFIGS["tiny"], camera=camera)
    head = dataclasses.replace(sizes.head, height="centre")
    model = build_model(dataclasses.replace(sizes, head=head))
    own = random_state(model)
    own |= {n: t for n, t in model.state_dict().items() if "vtransform" in n and t.ndim != 1}
    derived = r"vtransform\.[dbn]x$|relative_position_index$"
    own |= {n: t for n, t in model.state_dict().items() if re.search(derived, n)}
    file = {pcdet_bevfusion_name(n): pcdet_bevfusion_value(n, t) for n, t in own.items()}
    assert file["backbone_3d.conv_out.0.weight"].shape[1:4] == (3, 1, 1)
    report = load_state_dict(model, file)
    assert report.names == "openpcdet-bevfusion"
    assert set(report.loaded) == set(own)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, own[name]), name
    top = build_model(sizes, ("lidar", "decoder", "head"))
    with pytest.raises(InputError, match=r"predicts the centre of boxes"):
        load_state_dict(top, file)
    lidar = build_model(sizes, ("lidar",))
    assert load_state_dict(lidar, file).names == "openpcdet-bevfusion"
    # Its LiDAR part has CenterPoint's axes.
    centerpoint = build_centerpoint(CONFIGS_OF["voxels"], ("lidar",))
    assert load_state_dict(centerpoint, file).names == "openpcdet"


def test_exchanged_axes_are_the_same_function() -> None:
    sizes = CONFIGS["tiny"]
    theirs = build_centerpoint(CONFIGS_OF["voxels"], ("lidar",))
    theirs.load_state_dict(random_state(theirs))
    file = {
        pcdet_bevfusion_name(n.replace("pts_middle_encoder", "encoders.lidar.backbone")): t
        for n, t in theirs.state_dict().items()
    }
    ours = build_model(sizes, ("lidar",))
    load_state_dict(ours, {**file, "fuser.conv.0.weight": torch.ones(1, 1, 3, 3)})
    features, coords, _ = example_batch(sizes)[:3]
    with torch.no_grad():
        wanted = theirs.encode_lidar(features, coords[:, [0, 3, 2, 1]].contiguous(), 1)
        torch.testing.assert_close(ours.encode_lidar(features, coords, 1), wanted.mT)


# SECOND, PointPillars, VoxelNeXt ------------------------------------------------------------------


def test_parts_below_an_anchor_head_load() -> None:
    pillars = CONFIGS_OF["pillars"]
    model = build_centerpoint(pillars, ("lidar", "decoder"))
    own = random_state(model)
    file = {n.removeprefix("pts_"): t for n, t in own.items()}
    file["bbox_head.conv_cls.weight"] = torch.ones(18, 64, 1, 1)
    report = load_state_dict(model, file)
    assert report.names == "mmdet3d-voxelnet"
    assert report.not_used == ("bbox_head.conv_cls.weight",)
    weight = "pts_voxel_encoder.pfn_layers.0.linear.weight"
    assert list(report.converted) == [weight]
    # legacy=True: the offsets from the pillar's centre take the place of the coordinates too.
    points = torch.rand(5, 20, 11)
    legacy = torch.cat([points[..., -3:], points[..., 3:]], -1)
    wanted = F.linear(legacy, own[weight])
    torch.testing.assert_close(F.linear(points, model.state_dict()[weight]), wanted)
    for name, tensor in model.state_dict().items():
        assert name == weight or torch.equal(tensor, own[name]), name
    with pytest.raises(InputError, match="anchor head"):
        load_state_dict(build_centerpoint(pillars), file)
    voxels = CONFIGS_OF["voxels"]
    model = build_centerpoint(voxels, ("lidar", "decoder"))
    second = stored("openpcdet", random_state(build_centerpoint(voxels)), voxels)
    second = {n: t for n, t in second.items() if not n.startswith("dense_head.")}
    second["dense_head.conv_box.weight"] = torch.ones(42, 64, 1, 1)
    assert load_state_dict(model, second).not_used == ("dense_head.conv_box.weight",)


def test_stages_of_voxelnext_fit_an_encoder_of_six() -> None:
    from bevfusion.model._encoder import SparseEncoder

    lidar = dataclasses.replace(
        CONFIGS_OF["voxels"].lidar,
        encoder_channels=((8, 8, 16), *[(16, 16, 16)] * 4, (16, 16)),
        encoder_paddings=(*[(0, 0, 1)] * 5, (0, 0)),
    )
    model = nn.Module()
    model.pts_middle_encoder = SparseEncoder(lidar)
    del model.pts_middle_encoder.conv_out
    own = random_state(model)
    file = {
        pcdet_bevfusion_name(n.replace("pts_middle_encoder", "encoders.lidar.backbone")): t
        for n, t in own.items()
    }
    assert "backbone_3d.conv6.2.bn2.weight" in file
    report = load_state_dict(model, file)
    assert report.names == "openpcdet"
    assert set(report.loaded) == set(own)


# det3d's Waymo --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["voxels", "pillars"])
@pytest.mark.parametrize("prefix", ["", "single_det."])
def test_waymo_of_det3d_in_one_stage_and_two(form: str, prefix: str) -> None:
    config = {"voxels": VOXEL_CONFIGS, "pillars": PILLAR_CONFIGS}[form]["waymo"]
    small = dataclasses.replace(CONFIGS_OF[form].decoder, layers=config.decoder.layers)
    sizes = dataclasses.replace(
        CONFIGS_OF[form],
        decoder=small if form == "voxels" else config.decoder,
        lidar=CONFIGS_OF[form].lidar if form == "voxels" else config.lidar,
        head=config.head if form == "pillars" else dataclasses.replace(
            CONFIGS_OF[form].head, tasks=config.head.tasks, branches=config.head.branches
        ),
    )  # fmt: skip
    model = build_centerpoint(sizes)
    own = random_state(model)
    file = {f"{prefix}{n}": t for n, t in stored("det3d", own, sizes).items()}
    second = {"roi_head.shared_fc_layer.0.weight": torch.ones(2, 2, 1)} if prefix else {}
    report = load_state_dict(model, {**file, **second})
    assert report.names == "det3d"
    assert set(report.loaded) == set(own)
    assert report.not_used == tuple(second)
    assert not any(".vel." in name for name in own)
    if form == "pillars":
        assert own["pts_voxel_encoder.pfn_layers.1.linear.weight"].shape == (64, 64)


# What does not fit ------------------------------------------------------------------------------


def test_prefixes_of_wrapping_modules_are_taken_off(tmp_path) -> None:
    model = build_centerpoint(CONFIGS_OF["pillars"])
    own = random_state(model)
    for prefix in ("model.", "detector.", "ema_model.module."):
        torch.save({"state_dict": {f"{prefix}{n}": t for n, t in own.items()}}, tmp_path / "l.ckpt")
        assert set(load_weights(model, tmp_path / "l.ckpt").loaded) == set(own)


def test_a_file_of_two_models_and_values_that_are_not_finite_have_their_remedy() -> None:
    model = build_centerpoint(CONFIGS_OF["pillars"])
    own = random_state(model)
    both = {f"{who}.{n}": t for who in ("student", "teacher") for n, t in own.items()}
    with pytest.raises(InputError, match="under student and teacher: save those of one of them"):
        load_state_dict(model, both)
    name = next(iter(own))
    for value, fault in (
        (torch.full_like(own[name], torch.nan), "not finite"),
        (own[name].double() * 1e300, "not finite"),  # of float64, beyond the model's float32
        ((own[name] * 100).to(torch.int8), "no floats"),
    ):
        with pytest.raises(
            InputError, match=rf"1 problem:\n  {fault}: (?s:.*) trained without them$"
        ):
            load_state_dict(model, own | {name: value})
    with pytest.raises(InputError, match="missing"):
        load_state_dict(model, {})


def test_what_does_not_fit_is_named_with_the_nearest() -> None:
    config = CONFIGS_OF["pillars"]
    model = build_centerpoint(config)
    file = stored("openpcdet", random_state(model), config)
    file["backbone_2d.blocks.1.44.weight"] = file.pop("backbone_2d.blocks.1.4.weight")
    file["dense_head.heads_list.0.iou.1.weight"] = torch.ones(1, 16, 3, 3)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(InputError) as caught:
        load_state_dict(model, file)
    message = str(caught.value)
    assert (
        "missing: pts_backbone.blocks.1.3.weight [32, 32, 3, 3]; the file's nearest: "
        "backbone_2d.blocks.1.44.weight [32, 32, 3, 3] (here pts_backbone.blocks.1.43.weight)"
    ) in message
    assert (
        "unexpected: dense_head.heads_list.0.iou.1.weight [1, 16, 3, 3] (here pts_bbox" in message
    )
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("backbone_3d.shared_conv.0.weight", "VoxelNeXt"),
        ("dense_head.conv_cls.weight", "anchor head"),
        ("vtransform.dtransform.0.weight", "OpenPCDet's BEVFusion"),
        ("pts_bbox_head.task_heads.0.feature_adapt_cls.conv_offset.weight", "deformable heads"),
    ],
)
def test_networks_without_a_counterpart_are_named(name: str, said: str) -> None:
    config = CONFIGS_OF["voxels"]
    model = build_centerpoint(config)
    file = stored("openpcdet", random_state(model), config)
    file = {n: t for n, t in file.items() if not n.startswith("dense_head.")}
    with pytest.raises(InputError, match=said):
        load_state_dict(model, {**file, name: torch.ones(2)})


def test_det3d_s_pillars_with_the_points_distance_are_misshapen() -> None:
    config = CONFIGS_OF["pillars"]
    model = build_centerpoint(config)
    file = stored("det3d", random_state(model), config)
    weight = file["reader.pfn_layers.0.linear.weight"]
    file["reader.pfn_layers.0.linear.weight"] = F.pad(weight, (0, 1), value=1.0)
    with pytest.raises(InputError, match=r"misshapen: pts_voxel_encoder.pfn_layers.0.linear"):
        load_state_dict(model, file)


def test_names_can_be_said_and_unknown_ones_are_refused() -> None:
    config = CONFIGS_OF["pillars"]
    model = build_centerpoint(config)
    file = stored("det3d", random_state(model), config)
    assert load_state_dict(model, file, names="det3d").names == "det3d"
    with pytest.raises(InputError, match=r"missing: every entry of pts_backbone"):
        load_state_dict(model, file, names="openpcdet")
    with pytest.raises(InputError, match=f"unknown: use one of auto, {', '.join(NAMINGS)}"):
        load_state_dict(model, file, names="mmcv")
