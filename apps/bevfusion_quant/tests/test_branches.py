"""What each branch builds, quantizes and leaves float, and what patterns may leave out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bev_scenes import street_frame
from bevfusion.model import CONFIGS, PART_PATHS, PARTS, build_model
from bevfusion.quantization import expand_patterns, fuse_detector
from bevfusion_quant.options import Branch
from bevfusion_quant.ptq import FrameBatches, example_batch, fuse_branch, quantize_branch
from bevfusion_quant.stages import built_parts, quantized_parts
from bevquant_quantizers import TensorQuantizer

TINY = CONFIGS["tiny"]
WEIGHTED = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Linear)


@pytest.fixture(scope="module")
def fused() -> nn.Module:
    torch.manual_seed(0)
    return fuse_branch(build_model(TINY), example_batch(TINY)).model


def test_a_runs_folded_modules_follow_from_its_weights(
    fused: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By structure where that leaves what the run has weights for, else by capturing."""
    captured: list[str] = []
    parts = "bevfusion.quantization._parts"
    monkeypatch.setattr(f"{parts}.fuse_parts", lambda *args, **given: captured.append("") or fused)
    model, example, state = build_model(TINY).eval(), example_batch(TINY), fused.state_dict()
    assert repr(fuse_detector(model, example, state).model) == repr(fused)
    assert not captured
    monkeypatch.setattr(f"{parts}.fuse_model", lambda m: SimpleNamespace(model=m))
    assert fuse_detector(model, example, state) is fused
    assert captured


def parts_with_quantizers(model: nn.Module) -> set[str]:
    paths = [path for path, m in model.named_modules() if isinstance(m, TensorQuantizer)]
    return {part for part in PARTS for path in paths if path.startswith(f"{PART_PATHS[part]}.")}


def test_no_batch_norm_is_left(fused: nn.Module) -> None:
    assert not [p for p, m in fused.named_modules() if type(m).__name__.startswith("BatchNorm")]


@pytest.mark.parametrize("branch", ["camera", "lidar", "fuser", "decoder", "head", "all"])
def test_quantizers_are_where_the_branch_says_and_the_rest_has_a_reason(
    fused: nn.Module, branch: Branch
) -> None:
    model = fused
    if branch in ("camera", "lidar"):
        assert built_parts(branch) == (branch,)
        model = fuse_branch(build_model(TINY, built_parts(branch)), example_batch(TINY)).model
    stage = quantize_branch(model, example_batch(TINY), branch)
    wanted = set(quantized_parts(branch))
    assert parts_with_quantizers(stage.model) == wanted
    assert wanted == (set(PARTS) - {"head"} if branch == "all" else {branch})
    reasons = {item.path: item.reason for item in stage.result.skipped}
    for part in set(built_parts(branch)) - wanted:
        assert "branch" in reasons[PART_PATHS[part]]
    assert not any("excluded by" in reason for reason in reasons.values())


def test_the_head_comes_along_when_asked_for(fused: nn.Module) -> None:
    stage = quantize_branch(fused, example_batch(TINY), "all", with_head=True)
    assert parts_with_quantizers(stage.model) == set(PARTS)


def test_every_convolution_of_a_quantized_part_is_quantized_or_explained(fused: nn.Module) -> None:
    stage = quantize_branch(fused, example_batch(TINY), "all", with_head=True)
    skipped = {item.path for item in stage.result.skipped}
    left = [
        path
        for path, module in stage.model.named_modules()
        if isinstance(module, WEIGHTED) and not hasattr(module, "_weight_quantizer")
    ]
    assert [path for path in left if path not in skipped] == []


def test_patterns_may_leave_the_path_of_the_part_out(fused: nn.Module) -> None:
    def expand(*patterns: str) -> tuple[str, ...]:
        return expand_patterns(fused, patterns)

    assert expand("conv_input") == ("encoders.lidar.backbone.conv_input",)
    assert expand("backbone.layer1") == ("encoders.camera.backbone.layer1",)
    assert expand("fuser.0") == ("fuser.0",)
    assert expand("layer1.*", "layer1.*") == ("encoders.camera.backbone.layer1.*",)
    assert expand("blocks.0.0") == ("decoder.backbone.blocks.0.0",)
    assert expand("no_such_layer") == ("no_such_layer",)


def test_excluded_layers_stay_float_and_unknown_ones_are_refused(fused: nn.Module) -> None:
    example = example_batch(TINY)
    stage = quantize_branch(fused, example, "all", exclude=["conv_input", "layer4.0.conv2"])
    kinds = {path: type(module).__name__ for path, module in stage.model.named_modules()}
    assert kinds["encoders.lidar.backbone.conv_input.0"] == "SubMConv3d"
    assert kinds["encoders.camera.backbone.layer4.0.conv2"] == "Conv2d"
    assert kinds["encoders.camera.backbone.layer4.0.conv1"] == "QuantConv2d"
    with pytest.raises(ValueError, match="no_such_layer"):
        quantize_branch(fused, example, "all", exclude=["no_such_layer"])


def test_a_batch_holds_what_the_model_reads_and_no_more() -> None:
    frame = street_frame(0, size="tiny", beams=8, sweeps=1, azimuth_steps=200, cameras="tiny")
    for part in ("camera", "lidar"):
        model = build_model(TINY, (part,))
        batch = FrameBatches([frame], TINY, model)[0]
        assert (batch.images is None) == (part == "lidar")
        assert (len(batch.features) > 0) == (part == "lidar")
    assert batch.coords.shape[1] == 4
    whole = FrameBatches([frame], TINY, build_model(TINY))[0]
    assert whole.images is not None
    assert whole.depth is not None
    height, width = TINY.camera.image_size
    assert whole.images.shape == (1, 6, 3, height, width)
    assert whole.depth.shape == (1, 6, 1, height, width)
    assert float(whole.depth.max()) > 5  # metres


def test_additions_can_be_left_float_before_they_are_there(fused: nn.Module) -> None:
    pattern = "encoder_layers.encoder_layer1.0.quant_add"
    stage = quantize_branch(fused, example_batch(TINY), "lidar", exclude=[pattern])
    block = stage.model.get_submodule("encoders.lidar.backbone.encoder_layers.encoder_layer1.0")
    assert not hasattr(block, "quant_add")
