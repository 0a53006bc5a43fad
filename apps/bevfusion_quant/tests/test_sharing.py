"""Every quantizer that CUDA-BEVFusion shares by hand is shared, and comes from the data flow.

The pairs are those of its `qat/lean/quantize.py` (`quantize_encoders_camera_branch`,
`quantize_camera_backbone`, `quantize_encoders_lidar_branch`), written as module paths. The model is
quantized in one call, with a narrow ResNet-50: 3, 4, 6 and 3 blocks.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from model_batches import model_batch
from torch import nn

from bevfusion.model import (
    CONFIGS,
    PART_PATHS,
    Batch,
    BEVFusion,
    build_model,
    random_weights,
)
from bevquant_fusion import fuse_model
from bevquant_qnn import QuantConfig, QuantizeResult, quantize_model
from bevquant_quantizers import TensorQuantizer, calibrate

TINY = CONFIGS["tiny"]
DEEP = dataclasses.replace(
    TINY, camera=dataclasses.replace(TINY.camera, depths=(3, 4, 6, 3), width=4)
)
BACKBONE = "encoders.camera.backbone"
NECK = "encoders.camera.neck"
ENCODER = "encoders.lidar.backbone.encoder_layers"


@pytest.fixture(scope="module")
def fused() -> tuple[BEVFusion, Batch]:
    torch.manual_seed(0)
    model = build_model(DEEP)
    batch = model_batch(model, DEEP, voxels=60)
    random_weights(model, *batch)
    # In float64, where rounding does not change which cells become queries.
    exact = Batch(*(t.double() if getattr(t, "is_floating_point", bool)() else t for t in batch))
    return fuse_model(model.double(), exact).model.float(), batch


@pytest.fixture(scope="module")
def quantized(fused: tuple[BEVFusion, Batch]) -> QuantizeResult:
    model, batch = fused
    return quantize_model(model, example_inputs=batch)


def quantizer(result: QuantizeResult, path: str) -> TensorQuantizer:
    """The quantizer at `path`, or the input quantizer of the layer there."""
    module = result.model.get_submodule(path)
    found = module if isinstance(module, TensorQuantizer) else module._input_quantizer
    assert isinstance(found, TensorQuantizer)
    return found


def by_hand() -> list[tuple[str, str]]:
    """Every assignment of one quantizer to another place: (place, where it comes from).

    The first concatenation that runs joins layer3's output with layer4's, the second layer2's with
    the first's result; NVIDIA names them quant_concat0 and quant_concat1.
    """
    pairs = []
    for layer, concat, level in (("layer4", "quant_concat", 1), ("layer3", "quant_concat_1", 0)):
        major = f"{BACKBONE}.{layer}.0.conv1"
        pairs += [
            (f"{NECK}.{concat}", major),
            (f"{NECK}.lateral_convs.{level}.conv", major),
            (f"{BACKBONE}.{layer}.0.downsample.0", major),
        ]
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        pairs.append(
            (f"{BACKBONE}.layer{stage}.0.downsample.0", f"{BACKBONE}.layer{stage}.0.conv1")
        )
        for block in range(1, blocks):
            path = f"{BACKBONE}.layer{stage}.{block}"
            pairs.append((f"{path}.residual_quantizer", f"{path}.conv1"))
    return sorted(set(pairs))


def test_the_list_is_complete() -> None:
    assert len(by_hand()) == 2 * 3 + 4 + 2 + 3 + 5 + 2 - 2


@pytest.mark.parametrize(("place", "source"), by_hand())
def test_pairs_that_cuda_bevfusion_wires(
    quantized: QuantizeResult, place: str, source: str
) -> None:
    assert quantizer(quantized, place) is quantizer(quantized, source)


def test_downsampled_residuals_have_a_quantizer_of_their_own(quantized: QuantizeResult) -> None:
    for stage in (1, 2, 3, 4):
        own = quantizer(quantized, f"{BACKBONE}.layer{stage}.0.residual_quantizer")
        holders = [
            path
            for path, module in quantized.model.named_modules(remove_duplicate=False)
            if module is own
        ]
        assert holders == [f"{BACKBONE}.layer{stage}.0.residual_quantizer"]


def test_what_the_data_flow_shares_beyond_that_list(quantized: QuantizeResult) -> None:
    """Readers of one tensor, and operands that an integer kernel joins, in the other parts."""
    groups = (
        ("fuser.quant_concat", "fuser.0"),
        ("encoders.camera.vtransform.quant_concat", "encoders.camera.vtransform.depthnet.0"),
        ("decoder.backbone.blocks.1.0", "decoder.neck.deblocks.0.0"),
        ("decoder.neck.quant_concat", "heads.object.shared_conv"),
        *(
            (f"{ENCODER}.encoder_layer{i}.{j}.quant_add", f"{ENCODER}.encoder_layer{i}.{j}.conv1")
            for i in (1, 2, 3, 4)
            for j in (0, 1)
        ),
    )
    for first, second in groups:
        assert quantizer(quantized, first) is quantizer(quantized, second), first
    ranges = {id(quantizer(quantized, pair[0])) for pair in groups}
    assert len(ranges) == len(groups)


def test_every_layer_is_quantized_or_has_a_reason(quantized: QuantizeResult) -> None:
    notes = {item.path: item.reason for item in quantized.skipped}
    for path, module in quantized.model.named_modules():
        weighted = isinstance(module, nn.modules.conv._ConvNd | nn.Linear)
        if weighted and "_input_quantizer" not in module._modules:
            assert path in notes, path
    assert "attention" in notes["heads.object.decoder.0.self_attn"]
    assert "softmax" in notes["encoders.camera.vtransform"]
    assert "splat" in notes["encoders.camera.vtransform"]
    assert "interpolate" in notes["encoders.camera.neck"]
    assert "LayerNorm" in notes["heads.object.decoder.0.norm1"]
    assert "" not in notes
    assert not any("not followed" in reason for reason in notes.values())


def test_one_part_can_be_chosen(fused: tuple[BEVFusion, Batch]) -> None:
    model, batch = fused
    part = "lidar"  # all of them: test_branches.py
    config = QuantConfig(exclude=model.paths_outside((part,)))
    result = quantize_model(model, config, batch)
    root = PART_PATHS[part]
    assert result.quantized
    assert all(item.path.startswith(root) for item in result.quantized)
    inside = [m for p, m in result.model.named_modules() if isinstance(m, TensorQuantizer)]
    assert len(inside) == len(
        [m for m in result.model.get_submodule(root).modules() if isinstance(m, TensorQuantizer)]
    )
    left = {item.path for item in result.skipped if item.reason.startswith("excluded by")}
    weighted = sum(
        isinstance(m, nn.modules.conv._ConvNd | nn.Linear)
        for p, m in model.named_modules()
        if not p.startswith(root)
    )
    assert len(left) >= weighted


def test_the_calibrated_model_stays_close_to_the_float_one(
    fused: tuple[BEVFusion, Batch], quantized: QuantizeResult
) -> None:
    model, batch = fused
    twin = copy.deepcopy(quantized.model)
    calibrate(twin, [batch], forward=lambda m, b: m(*b), method="max")
    maps: list[torch.Tensor] = []
    hooks = [
        m.get_submodule("decoder.neck").register_forward_hook(lambda *call: maps.append(call[2]))
        for m in (model, twin)
    ]
    with torch.no_grad():
        model(*batch)
        twin(*batch)
    for hook in hooks:
        hook.remove()
    wanted, got = maps
    noise = float((got - wanted).square().mean() / wanted.square().mean())
    assert 1e-6 < noise < 0.05
