"""A detector quantized by parts, beside float: what stays float and why, layers, stages, mAP."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from bev_data import InputError
from bev_data.points import Frame
from bevfusion.detectors import example_of
from bevfusion.evaluation import FrameBatches
from bevfusion.model import CONFIGS, BEVFusion, build_model, example_batch, random_weights
from bevfusion.quantization import (
    MeanAp,
    calibrate_detector,
    compare_layers,
    expand_patterns,
    fuse_detector,
    quantize_detector,
    relative_change,
    whole_output,
)
from bevquant_quantizers import calibrate

TINY = CONFIGS["tiny"]
BATCH = example_batch(TINY)._replace(images=None, depth=None, cells=None)


@pytest.fixture(scope="module")
def fused() -> BEVFusion:
    model = build_model(TINY, ("lidar", "decoder")).eval()
    random_weights(model, *BATCH, seed=0)
    return fuse_detector(model, BATCH).model  # type: ignore[return-value]


def test_examples_have_the_sensors_of_the_batch() -> None:
    alike = example_of(TINY, BATCH)
    assert alike.images is None
    assert torch.equal(alike.features, BATCH.features)
    assert example_batch(TINY).images.shape == (1, 1, 3, *TINY.camera.image_size)


def test_equal_masked_scores_are_no_change() -> None:
    wanted = torch.tensor([-math.inf, 4.0])
    assert relative_change(wanted, torch.tensor([-math.inf, 5.0])) == 0.25
    assert relative_change(wanted, torch.tensor([0.0, 4.0])) == math.inf
    assert relative_change(wanted, torch.tensor([-math.inf, math.nan])) == math.inf


def test_a_part_is_quantized_and_the_others_say_why_not(fused: BEVFusion) -> None:
    left = {"exclude": ["neck.*"], "first_layer": False}
    made = quantize_detector(fused, BATCH, ["decoder"], **left)
    assert all(module.path.startswith("decoder.backbone") for module in made.quantized)
    below = [item for item in made.skipped if item.path.startswith("encoders.lidar")]
    assert [item.reason for item in below] == ["not among the parts to quantize"]
    with pytest.raises(InputError, match="camera"):
        quantize_detector(fused, BATCH, ["camera"])


def test_the_first_sparse_convolution_may_stay(fused: BEVFusion) -> None:
    reasons = {"first layer": "a user said so", "decoder": "so did another"}
    made = quantize_detector(fused, BATCH, ["lidar"], first_layer=False, reasons=reasons)
    told = {item.reason: item.path for item in made.skipped}
    assert told["so did another"] == "decoder"
    assert expand_patterns(fused, ["conv_input.0"]) == (told["a user said so"],)


def test_settings_of_layers_and_of_the_calibration_are_handed_on(fused: BEVFusion) -> None:
    model: Any = quantize_detector(fused, BATCH, ["decoder"], weight_bits=4, num_bits=7).model
    reports = [
        calibrate_detector(model, [BATCH], method="percentile", percentile=share)
        for share in (50.0, 100.0)
    ]
    for half, whole in zip(*(report.quantizers for report in reports), strict=True):
        assert half.names == whole.names
        weighs = half.names[0].endswith("_weight_quantizer")
        assert model.get_submodule(half.names[0]).num_bits == (4 if weighs else 7)
        assert weighs or half.amax < whole.amax


def test_layers_and_stages_beside_float(fused: BEVFusion) -> None:
    model: Any = quantize_detector(fused, BATCH, ["decoder"], method="max").model
    calibrate(model, [BATCH], forward=lambda net, batch: net(*batch), method="max")
    found = compare_layers(fused, model, [BATCH])
    stages = {stage.row.stage: stage.row for stage in found.stages}
    assert list(stages) == ["lidar", "decoder"]
    assert stages["lidar"].sqnr_db is None  # float in both
    with torch.no_grad():
        wanted, got = (whole_output(net(*BATCH)).double() for net in (fused, model))
    decibels = 10 * math.log10(float(wanted.square().sum() / (got - wanted).square().sum()))
    assert stages["decoder"].sqnr_db == pytest.approx(decibels, rel=1e-6)
    assert (found.rows[-1].layer, found.rows[-1].kind) == ("output", "bird's-eye view")
    assert found.rows[-1].sqnr_db == pytest.approx(decibels, rel=1e-6)


def test_mean_ap_wants_a_head_and_labels(fused: BEVFusion) -> None:
    points = np.array([[10.0, 0.0, -1.0, 80.0, 0.0]], np.float32)
    batches = FrameBatches([Frame("one", points)], TINY, fused)
    with pytest.raises(InputError, match="model is lidar and decoder alone"):
        MeanAp(fused, batches)
    with pytest.raises(InputError, match="none of the frames has labels"):
        MeanAp(build_model(TINY, ("lidar", "decoder", "head")), batches)
