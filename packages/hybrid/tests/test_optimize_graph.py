"""optimize_graph: inputs and output of a concatenation share one scale on BERNOULLI2."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import bevquant_hybrid as horizon
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    convert_fx,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    prepare_calibration_fx,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)

QAT, CALIB = get_default_qat_qconfig(), get_default_calib_qconfig()


class Joins(nn.Module):
    """Two concatenations with a tensor in common, behind views and a pool, and one apart."""

    def __init__(self, scale: float | None = None, other: float | None = None) -> None:
        super().__init__()
        self.quant, self.second = QuantStub(scale), QuantStub(other)
        self.dequant = DeQuantStub()
        self.left, self.right = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 1)
        self.pool, self.relu = nn.MaxPool2d(1), nn.ReLU()
        self.cat, self.again, self.apart = (nn.quantized.FloatFunctional() for _ in range(3))
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.quant(x), self.second(y)
        left, right = self.pool(self.left(x)), self.relu(self.right(x)).transpose(2, 3)
        joined = self.cat.cat([left, right], 1)
        more = self.again.cat((joined, y), dim=1)
        alone = self.apart.cat([x], 1)
        return self.dequant(self.head(more)), self.dequant(alone)


def scales(model: nn.Module) -> dict[str, float]:
    paths = ("quant", "second", "left", "right", "cat", "again", "apart", "head")
    quantizers = {path: model.get_submodule(path).activation_post_process for path in paths}
    return {path: round(q.scale.item(), 7) for path, q in quantizers.items()}


@pytest.fixture
def pictures() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 2, 5, 5), 4 * torch.randn(2, 2, 5, 5)


TIED = ("left", "right", "cat", "again", "second")


@pytest.mark.parametrize("at", ["calibration and training", "training alone", "eager"])
def test_one_scale_for_what_is_joined(at: str, pictures) -> None:
    horizon.march.set_march("bernoulli2")
    model = Joins().eval()
    if at == "eager":
        model.qconfig = QAT
        made = prepare_qat(model, optimize_graph=True)
        for _ in range(3):
            made(*pictures)
    else:
        both = at.startswith("calibration")
        calibrated = prepare_calibration_fx(model, {"": CALIB}, optimize_graph=both).eval()
        calibrated(*pictures)
        made = prepare_qat_fx(calibrated, {"": QAT}, optimize_graph=True)
    set_fake_quantize(made.eval(), "validation")
    found = scales(made)
    assert len({found[path] for path in TIED}) == 1
    # "apart" joins the picture alone, which is no input of the others.
    assert found["apart"] == found["quant"] != found["cat"]
    assert found["head"] != found["cat"]
    largest = max(p.abs().max().item() for p in pictures)
    assert found["cat"] * 127.5 == pytest.approx(largest, rel=0.02)
    result = made(*pictures)
    converted = (convert if at == "eager" else convert_fx)(made)
    step = made.head.activation_post_process.scale.item()
    gain = made.head.weight.abs().sum((1, 2, 3)).max().item() * found["cat"]
    assert (converted(*pictures)[0] - result[0]).abs().max() <= 1.01 * (step + gain)
    # Nothing is rescaled where values are joined.
    left = converted.left(converted.quant(pictures[0]))
    joined = converted.cat.cat([left, left], 1)
    assert torch.equal(joined.int_repr()[:, :3], left.int_repr())


def test_other_marches_rescale_and_nothing_changes(pictures) -> None:
    made = prepare_qat_fx(Joins(), {"": QAT}, optimize_graph=True)
    made(*pictures)
    found = scales(made)
    assert len({found[path] for path in TIED}) == len(TIED)


def test_a_fixed_scale_is_everyones(pictures) -> None:
    horizon.march.set_march("bernoulli2")
    made = prepare_qat_fx(Joins(other=1 / 16), {"": QAT}, optimize_graph=True)
    made(*pictures)
    assert {scales(made)[path] for path in TIED} == {1 / 16}


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"left": get_default_qat_out_qconfig()}, "left has 32 bits"),
        ({"left": get_default_qat_qconfig(dtype="qint16")}, "they have qint16, qint8"),
        ({"left": get_default_qat_qconfig(activation_fake_quant="lsq")}, "left is learned"),
    ],
)
def test_what_cannot_share_is_named(settings, what: str) -> None:
    horizon.march.set_march("bernoulli2")
    with pytest.raises(ValueError, match=rf"optimize_graph=True gives .*left.* one scale.*{what}"):
        prepare_qat_fx(Joins(), {"": QAT, "module_name": settings}, optimize_graph=True)


def test_the_largest_range_of_all_decides_at_every_step(pictures) -> None:
    horizon.march.set_march("bernoulli2")
    newest = get_default_qat_qconfig(activation_qkwargs={"averaging_constant": 1.0})
    made = prepare_qat_fx(Joins(), {"": newest}, optimize_graph=True)
    x, y = pictures
    for factor in (1.0, 3.0, 0.1):
        made(x, factor * y)
        ranges = {p: quantizer(made, p).activation_post_process for p in TIED}
        largest = max(o.calculate_qparams()[0].item() for o in ranges.values())
        assert {scales(made)[path] for path in TIED} == {round(largest, 7)}
    copied = copy.deepcopy(made)
    copied(x, 50 * y)
    assert scales(copied)["left"] > 10 * scales(made)["left"]
    quantizer(made, "right").set_qparams(0.5)
    assert {scales(made)[path] for path in TIED} == {0.5}


def quantizer(model: nn.Module, path: str) -> nn.Module:
    return model.get_submodule(path).activation_post_process


def test_two_fixed_scales_and_narrowed_optimizations_are_refused() -> None:
    class Two(Joins):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.dequant(self.cat.cat([self.quant(x), self.second(y)], 1))

    horizon.march.set_march("bernoulli2")
    with pytest.raises(ValueError, match=r"their scales are fixed at \[0\.25, 0\.5\]"):
        prepare_qat_fx(Two(0.25, 0.5), {"": QAT}, optimize_graph=True)
    with pytest.raises(ValueError, match=r"optimize_kwargs=\['methods'\]: not offered"):
        prepare_qat(Two(), optimize_graph=True, optimize_kwargs={"methods": ("add",)})
