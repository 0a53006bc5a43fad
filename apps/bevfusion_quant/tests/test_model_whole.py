"""The whole model: parts, decoder and fuser by hand, random weights, folding stage by stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_batches import model_batch
from torch import Tensor, nn

from bevfusion.model import (
    CONFIGS,
    PART_PATHS,
    PARTS,
    STAGES,
    Batch,
    BEVFusion,
    build_lidar_branch,
    build_model,
    random_weights,
)
from bevfusion_quant import InputError
from bevquant_fusion import fuse_model

TINY = CONFIGS["tiny"]


@contextmanager
def stage_outputs(model: BEVFusion) -> Iterator[dict[str, Any]]:
    """What each part puts out while the model runs."""
    outputs: dict[str, Any] = {}
    hooks = [
        model.get_submodule(STAGES[part]).register_forward_hook(
            lambda module, args, output, part=part: outputs.update({part: output})
        )
        for part in model.parts
    ]
    yield outputs
    for hook in hooks:
        hook.remove()


@pytest.fixture(scope="module")
def filled() -> tuple[BEVFusion, Batch]:
    model = build_model(TINY)
    batch = model_batch(model, TINY, frames=2, cameras=2, voxels=800)
    random_weights(model, *batch, seed=1)
    return model, batch


def doubled(batch: Batch) -> Batch:
    return Batch(*(t.double() if getattr(t, "is_floating_point", bool)() else t for t in batch))


def test_every_stage_has_the_configurations_size(filled: tuple[BEVFusion, Batch]) -> None:
    model, batch = filled
    with torch.no_grad(), stage_outputs(model) as outputs:
        answer = model(*batch)
    maps = {part: tuple(output.shape) for part, output in outputs.items() if part != "head"}
    assert maps == {
        "camera": (2, 16, 40, 40),
        "lidar": (2, 128, 40, 40),
        "fuser": (2, 32, 40, 40),
        "decoder": (2, 64, 40, 40),
    }
    assert answer is outputs["head"]
    assert answer["heatmap"].shape == (2, 10, 100)
    assert len(model.head.decode(answer)) == 2


@pytest.mark.parametrize(
    ("parts", "shape"),
    [
        (("lidar",), (1, 128, 40, 40)),
        (("camera",), (1, 16, 40, 40)),
        (("fuser", "lidar", "camera"), (1, 32, 40, 40)),
        (("lidar", "decoder"), (1, 64, 40, 40)),
        (("camera", "decoder"), (1, 64, 40, 40)),
        (("lidar", "decoder", "head"), None),
        (("camera", "decoder", "head"), None),
    ],
)
def test_parts_that_run_together(parts: tuple[str, ...], shape: tuple[int, ...] | None) -> None:
    model = build_model(TINY, parts)
    assert model.parts == tuple(part for part in PARTS if part in parts)
    with torch.no_grad():
        output = model(*model_batch(model, TINY))
    if shape is None:
        assert output["center"].shape == (1, 2, 100)
    else:
        assert output.shape == shape
    assert not {PART_PATHS[part] for part in set(PARTS) - set(parts)} & {
        path for path, _ in model.named_modules()
    }


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((), "none of them reads a sensor"),
        (("decoder", "head"), "none of them reads a sensor: add camera or lidar"),
        (("camera", "lidar"), "two maps, and nothing joins them: add fuser"),
        (("lidar", "fuser"), "the fuser joins two maps: add camera"),
        (("camera", "fuser", "decoder"), "the fuser joins two maps: add lidar"),
        (("lidar", "head"), "the head reads the decoder's map: add decoder"),
        (("lidar", "radar"), r"unknown parts \['radar'\]: the model consists of camera, lidar"),
    ],
)
def test_parts_that_make_no_sense_are_refused(parts: tuple[str, ...], why: str) -> None:
    with pytest.raises(InputError, match=why):
        build_model(TINY, parts)


def test_missing_inputs_are_named(filled: tuple[BEVFusion, Batch]) -> None:
    model, batch = filled
    with pytest.raises(InputError, match=r"camera branch reads images, depth, cells, and depth"):
        model(*batch._replace(depth=None))
    with pytest.raises(InputError, match=r"LiDAR branch reads features, coords, and features"):
        model(*batch._replace(features=None))
    lidar = build_model(TINY, ("lidar",))
    with pytest.raises(LookupError, match="no camera branch, only lidar"):
        _ = lidar.camera
    with pytest.raises(LookupError, match="no head, only lidar"):
        _ = lidar.head


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"images": torch.zeros(2, 2, 3, 96, 250)}, "takes 3 channels of 96 × 256 pixels"),
        ({"images": torch.zeros(2, 2, 1, 96, 256)}, "takes 3 channels of 96 × 256 pixels"),
        ({"images": torch.zeros(4, 3, 96, 256)}, r"expected \[2, cameras, 3, 96, 256\]"),
        ({"images": torch.zeros(1, 2, 3, 96, 256)}, "one entry for each frame"),
        ({"images": torch.zeros(2, 0, 3, 96, 256)}, "at least one camera"),
        ({"images": torch.zeros(2, 3, 3, 96, 256)}, "one depth image for each camera image"),
        ({"depth": torch.zeros(2, 2, 1, 48, 128)}, "one depth image for each camera image"),
        ({"cells": torch.zeros(100).long()}, "2 frames of 2 cameras have 90624 frustum points"),
    ],
)
def test_camera_inputs_that_do_not_fit_are_named(
    filled: tuple[BEVFusion, Batch], change: dict[str, Tensor], why: str
) -> None:
    model, batch = filled
    with pytest.raises(InputError, match=why):
        model(*batch._replace(**change))


def test_the_lidar_branch_alone_is_the_models() -> None:
    model, branch = build_model(TINY, ("lidar",)), build_lidar_branch(TINY.lidar)
    assert str(model) == str(branch)
    batch = model_batch(model, TINY)
    random_weights(model, *batch, seed=4)
    random_weights(branch, batch.features, batch.coords, seed=4)
    with torch.no_grad():
        assert torch.equal(model(*batch), branch(*batch))


def by_hand(state: dict[str, Tensor], path: str, x: Tensor, *, eps: float, **how: Any) -> Tensor:
    """relu(norm(conv(x))) of members `path`.i and i + 1, from their parameters alone."""
    root, _, index = path.rpartition(".")
    run = F.conv_transpose2d if how.pop("up", False) else F.conv2d
    x = run(x, state[f"{path}.weight"], **how)
    norm = f"{root}.{int(index) + 1}"
    mean, var, weight, bias = (
        state[f"{norm}.{leaf}"][:, None, None]
        for leaf in ("running_mean", "running_var", "weight", "bias")
    )
    return ((x - mean) / torch.sqrt(var + eps) * weight + bias).clamp_min(0)


def test_fuser_and_decoder_equal_their_formulas(filled: tuple[BEVFusion, Batch]) -> None:
    model, batch = filled
    with torch.no_grad(), stage_outputs(model) as got:
        model(*batch)
    state = model.state_dict()
    x = torch.cat([got["camera"], got["lidar"]], 1)
    x = by_hand(state, "fuser.0", x, eps=1e-5, padding=1)
    torch.testing.assert_close(got["fuser"], x)
    blocks = "decoder.backbone.blocks"
    fine = by_hand(state, f"{blocks}.0.0", x, eps=1e-3, padding=1)
    fine = by_hand(state, f"{blocks}.0.3", fine, eps=1e-3, padding=1)
    coarse = by_hand(state, f"{blocks}.1.0", fine, eps=1e-3, padding=1, stride=2)
    coarse = by_hand(state, f"{blocks}.1.3", coarse, eps=1e-3, padding=1)
    ups = [
        by_hand(state, "decoder.neck.deblocks.0.0", fine, eps=1e-3),
        by_hand(state, "decoder.neck.deblocks.1.0", coarse, eps=1e-3, stride=2, up=True),
    ]
    torch.testing.assert_close(got["decoder"], torch.cat(ups, 1), rtol=1e-4, atol=1e-4)


def test_random_weights_keep_every_layer_of_every_part_alive(
    filled: tuple[BEVFusion, Batch],
) -> None:
    model, batch = filled
    spread: dict[str, float] = {}
    kinds = (nn.modules.batchnorm._BatchNorm, nn.Conv2d, nn.Conv1d, nn.Linear, nn.LayerNorm)
    hooks = [
        module.register_forward_hook(
            lambda m, i, output, path=path: spread.update({path: float(output.std())})
        )
        for path, module in model.named_modules()
        if isinstance(module, kinds) and not path.endswith("out_proj")
    ]
    with torch.no_grad(), stage_outputs(model) as outputs:
        model(*batch)
    for hook in hooks:
        hook.remove()
    assert len(spread) == len(hooks) > 100
    norms = {p: s for p, s in spread.items() if p.endswith((".bn", ".1", ".4")) and "conv" not in p}
    assert min(spread.values()) > 0.1, min(spread, key=spread.__getitem__)
    assert max(norms.values()) < 3
    for part, output in outputs.items():
        if part != "head":
            alive = output.flatten(2).amax((0, 2)) > 0.1
            assert alive.float().mean() > 0.9, part
            assert output.abs().max() < 100
    scores = outputs["head"]["dense_heatmap"].sigmoid()
    assert 0.05 < float((scores > 0.5).float().mean()) < 0.95


def test_random_weights_repeat(filled: tuple[BEVFusion, Batch]) -> None:
    model, batch = filled
    again = build_model(TINY)
    random_weights(again, *batch, seed=1)
    wanted = model.state_dict()
    assert all(torch.equal(t, wanted[name]) for name, t in again.state_dict().items())
    random_weights(again, *batch, seed=2)
    assert not torch.equal(again.state_dict()["fuser.0.weight"], wanted["fuser.0.weight"])
    geometry = "encoders.camera.vtransform.frustum"
    assert torch.equal(again.state_dict()[geometry], wanted[geometry])


def test_folding_changes_no_stage_in_float64() -> None:
    model = build_model(TINY)
    batch = model_batch(model, TINY)
    random_weights(model, *batch, seed=2)
    model, batch = model.double(), doubled(batch)
    result = fuse_model(model, batch)
    assert result.skipped == ()
    assert result.untraced == {}
    assert not [m for m in result.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    fused = result.model
    with torch.no_grad(), stage_outputs(model) as wanted, stage_outputs(fused) as got:
        model(*batch)
        fused(*batch)
    assert tuple(wanted) == PARTS
    for part in PARTS[:-1]:
        change = (got[part] - wanted[part]).abs().max() / wanted[part].abs().max()
        assert 0 <= float(change) < 1e-10, part
    for name, tensor in wanted["head"].items():
        torch.testing.assert_close(got["head"][name], tensor, rtol=1e-9, atol=1e-10)
