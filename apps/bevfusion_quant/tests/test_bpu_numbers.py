"""A run for a BPU in numbers: layers, stages and estimate against arithmetic done here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bpu_split import TINY, Split, split

from bevfusion_quant.bpu import BpuComparison, compare_forms
from bevquant_hybrid.qtensor import QTensor, as_float

CONV1 = "camera/backbone_conv1"


@pytest.fixture(scope="module")
def whole() -> Split:
    return split()


@pytest.fixture(scope="module")
def told(whole: Split) -> tuple[dict, dict, dict]:
    """What float, fake-quantized and integer model tell of the frame."""
    real, fake, integer = (whole.values(model) for model in whole.models)
    return real, fake, integer


@pytest.fixture(scope="module")
def comparison(whole: Split) -> BpuComparison:
    return compare_forms(whole.models, whole.forms, whole.batches)


def decibels(wanted: torch.Tensor, got: torch.Tensor) -> float:
    wanted, got = wanted.double(), got.double()
    return 10 * math.log10(float(wanted.square().sum() / (got - wanted).square().sum()))


def test_the_float_model_is_the_model(whole: Split, told: tuple[dict, dict, dict]) -> None:
    with torch.no_grad():
        wanted = whole.model(*whole.batches[0])["dense_heatmap"]
    got = told[0]["output"]["dense_heatmap"]
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-4


def test_the_first_layer_is_what_the_formulas_say(
    whole: Split, told: tuple[dict, dict, dict]
) -> None:
    """Scales of amax/127.5, half to even in training, half up in integers, one rounding."""
    images = whole.batches[0].images.flatten(0, 1)
    conv, bn = whole.model.camera["backbone"].conv1, whole.model.camera["backbone"].bn1
    gain = bn.weight / torch.sqrt(bn.running_var + bn.eps)
    weight = (conv.weight * gain[:, None, None, None]).detach()
    bias = (bn.bias - bn.running_mean * gain).detach()
    folded = whole.units.fused["camera"].get_submodule("backbone.conv1").part("conv")
    assert torch.allclose(folded.weight, weight, rtol=1e-5, atol=1e-7)
    assert torch.allclose(folded.bias, bias, rtol=1e-5, atol=1e-6)
    weight, bias = folded.weight.detach(), folded.bias.detach()  # the last bit decides roundings

    # 2048 bins from 0 to the largest; the lower edge of the bin where 99.99 % are reached
    size = images.abs().max() / 2048
    step = float(told[1]["camera/quant_images"].scale)
    edge = np.quantile(images.abs().numpy(), 0.9999)
    assert -float(size) <= step * 127.5 - edge <= 0.01 * float(size)

    weight_step = weight.abs().amax((1, 2, 3)) / 127.5
    steps = weight.double() / weight_step.double()[:, None, None, None]
    q_weight = whole.forms["camera"].integer_graph.get_submodule("backbone.conv1").weight.float()
    # A channel's largest weight lies at ±127.5 steps, where the last bit decides.
    assert float((q_weight - steps).abs().max()) <= 0.5 + 1e-4
    assert q_weight.min() >= -128
    q_images = (images / step).round().clamp(-128, 127)
    exact = F.conv2d(images, weight, bias, stride=2, padding=3).relu()
    assert torch.allclose(told[0][CONV1], exact, atol=1e-4 * float(exact.abs().max()))

    out_step = float(told[1][CONV1].scale)
    faked = F.conv2d(
        q_images * step, q_weight * weight_step[:, None, None, None], bias, stride=2, padding=3
    ).relu()
    q_faked = (faked / out_step).round().clamp(-128, 127)
    off = (told[1][CONV1].int_repr() - q_faked).abs()
    assert float(off.max()) <= 1  # float32 sums in another order, at ties
    assert float((off > 0).double().mean()) < 1e-3

    integers = torch.floor(images.double() / np.float32(step) + 0.5).clamp(-128, 127)
    q_bias = (bias.double() / (step * weight_step.double())).round()
    acc = F.conv2d(integers, q_weight.double(), q_bias, stride=2, padding=3).clamp(min=0)
    factor = step * weight_step.double() / out_step
    wanted = torch.floor(acc * factor[:, None, None] + 0.5).clamp(-128, 127)
    got = told[2][CONV1].int_repr()
    off = (got - wanted).abs()
    assert float(off.max()) <= 1
    assert float((off > 0).double().mean()) < 1e-4  # steps are float32 in the model


def test_rows_are_what_the_values_say(
    whole: Split, told: tuple[dict, dict, dict], comparison: BpuComparison
) -> None:
    real, fake, integer = told
    labels = {
        label.path: f"{unit}/{node}"
        for unit, form in whole.forms.items()
        for node, label in form.labels.items()
    }
    assert len(comparison.layers) == 35
    for row in comparison.layers:
        name = labels[row.layer]
        assert isinstance(fake[name], QTensor)
        wanted = real[name]
        assert row.fake_sqnr_db == pytest.approx(decibels(wanted, as_float(fake[name])), rel=1e-6)
        assert row.integer_sqnr_db == pytest.approx(
            decibels(wanted, as_float(integer[name])), rel=1e-6
        )
        apart = (integer[name].int_repr().int() - fake[name].int_repr().int()).abs()
        assert row.max_steps == int(apart.max())
        assert row.mean_steps == pytest.approx(float(apart.double().mean()))
        assert row.differ == pytest.approx(float((apart > 0).double().mean()))
        assert row.channels == wanted.shape[1]
        assert row.cells == wanted.numel() / wanted.shape[1]
    first = comparison.layers[0]
    amax = float(fake["camera/quant_images"].scale) * 127.5
    assert first.input_amax == pytest.approx(amax)
    images = whole.batches[0].images
    assert first.saturated == pytest.approx(float((images.abs() > amax).double().mean()))
    cat = next(row for row in comparison.layers if row.layer == "fuser.cat_0")
    maps = [fake[f"bev/quant_{name}_map"].scale * 127.5 for name in ("camera", "lidar")]
    assert cat.input_amax == pytest.approx(float(max(maps)))


def test_stages_are_what_the_values_say(
    told: tuple[dict, dict, dict], comparison: BpuComparison
) -> None:
    real, fake, integer = ({k: as_float(v) for k, v in t.items() if k != "output"} for t in told)
    stages = {row.stage: row for row in comparison.stages}
    assert list(stages) == ["neck", "camera", "lidar", "fuser", "decoder", "head"]
    assert stages["lidar"].fake_sqnr_db is None  # the same modules on the same points
    for name in ("neck", "camera", "fuser", "decoder", "head"):
        row = stages[name]
        assert row.fake_sqnr_db == pytest.approx(decibels(real[name], fake[name]), rel=1e-6)
        assert row.integer_sqnr_db == pytest.approx(decibels(real[name], integer[name]), rel=1e-6)
        both = torch.stack([real[name].flatten(), integer[name].flatten()]).double()
        assert row.integer_cosine == pytest.approx(
            float(torch.cosine_similarity(both[0], both[1], dim=0))
        )
    assert 20 < stages["decoder"].integer_sqnr_db < 60
    output = comparison.evaluation.layers[-1]
    assert (output.layer, output.kind) == ("output", "heatmap")
    assert output.sqnr_db == pytest.approx(stages["head"].fake_sqnr_db)


def test_the_estimate_is_operations_and_bytes_over_published_rates(whole: Split) -> None:
    estimates = whole.units.estimates(whole.forms)
    layers = {layer.path: layer for e in estimates.values() for layer in e.layers}
    conv1 = layers["encoders.camera.backbone.conv1"]
    height, width = (n // 2 for n in TINY.camera.image_size)
    cells = 6 * height * width
    assert conv1.operations == 2 * cells * 16 * 3 * 49
    moved = 6 * 3 * 96 * 256 + 16 * 3 * 49 + 4 * 16 + cells * 16
    assert conv1.loaded_bytes + conv1.stored_bytes == moved
    figures = estimates["camera"].figures
    rate = figures.peak_tops.value / figures.cores.value * 1e12
    memory = figures.ddr_gigabytes_per_second.value * 1e9
    assert conv1.seconds == pytest.approx(max(conv1.operations / rate, moved / memory))
    fused = layers["encoders.camera.backbone.layer1.0.conv3"]  # with the addition behind it
    assert fused.operations == 2 * 6 * 24 * 64 * 64 * 16
    assert layers["fuser.0"].operations == 2 * 40 * 40 * 32 * 144 * 9
    assert estimates["bev"].seconds == pytest.approx(
        sum(x.seconds for p, x in layers.items() if not p.startswith("encoders"))
    )
    assert not any(e.violations for e in estimates.values())
