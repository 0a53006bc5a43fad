"""Corners of prepare: boundaries that calibration did not have, views, folded weights, odd code."""

import pytest
import torch
from torch import nn

from bevquant_hybrid.march import March, set_march
from bevquant_hybrid.nn.quantized import FloatFunctional
from bevquant_hybrid.partition import partition
from bevquant_hybrid.qat_mode import set_qat_mode
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    fuse_fx,
    get_default_calib_qconfig,
    get_default_qat_qconfig,
    prepare_calibration_fx,
    prepare_qat_fx,
)

QAT = {"": get_default_qat_qconfig()}


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.second, self.third = (nn.Conv2d(4, 4, 1) for _ in range(3))

    def forward(self, x):
        return self.dequant(self.third(self.second(self.first(self.quant(x)))))


def test_a_boundary_that_calibration_did_not_have_starts_from_the_layers_scale():
    calibration = prepare_calibration_fx(Chain(), {"": get_default_calib_qconfig()}, hybrid=True)
    images = torch.randn(2, 4, 6, 6)
    calibration.eval()(images)
    scale = calibration.second.activation_post_process.calculate_qparams()[0]
    where = {"hybrid": True, "hybrid_dict": {"module_name": ["second"]}}
    made = prepare_qat_fx(calibration, QAT, **where)
    boundary = made.second_activation_post_process.activation_post_process
    assert torch.equal(boundary.scale, scale.reshape(1))
    assert float(scale) != 1


@pytest.mark.parametrize("march", [March.BERNOULLI2, March.BAYES])
@pytest.mark.parametrize("view", ["reshape", "contiguous", "clone", "unbind"])
def test_views_are_where_the_plan_says(march, view):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.quant, self.first, self.second = (
                QuantStub(),
                nn.Conv2d(4, 4, 1),
                nn.Conv2d(4, 4, 1),
            )

        def forward(self, x):
            y = self.first(self.quant(x))
            if view == "reshape":
                y = y.reshape(2, 4, 4, 9)
            elif view == "unbind":
                y = y.unbind(0)[0].unsqueeze(0)
            else:
                y = getattr(y, view)()
            return self.second(y)

    set_march(march)
    plan = partition(fuse_fx(Views()), march)
    made = prepare_qat_fx(Views(), QAT, hybrid=True)
    assert [node.name for node in plan.nodes] == [node.name for node in made.graph.nodes]
    on_cpu = view in ("reshape", "unbind") and march == March.BERNOULLI2
    assert any("_input_dequant" in node.name for node in made.graph.nodes) is on_cpu


def test_reverse_fold_starts_from_the_folded_weight():
    set_qat_mode("with_bn_reverse_fold")
    model = nn.Sequential(QuantStub(), nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
    model[2].running_var.fill_(0.01)
    made = prepare_qat_fx(model, QAT)
    folded = model[1].weight.detach() / torch.sqrt(torch.tensor(0.01) + model[2].eps)
    expected = folded.flatten(1).abs().amax(1) / 127.5
    (layer,) = (m for m in made.modules() if hasattr(m, "weight_fake_quant"))
    assert torch.allclose(layer.weight_fake_quant.scale, expected, rtol=1e-4)


def test_an_addition_that_the_code_looks_at_is_fused():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.quant, self.conv, self.add = QuantStub(), nn.Conv2d(4, 4, 1), FloatFunctional()

        def forward(self, x):
            x = self.quant(x)
            if self.add is not None:
                x = self.add.add(self.conv(x), x)
            return x

    assert "ConvAdd2d" in str(fuse_fx(Looks()))


@pytest.mark.parametrize("key", ["module_name", "module_type"])
def test_a_string_is_no_list_of_names(key):
    with pytest.raises(TypeError, match=f"hybrid_dict: {key} is 'second'; expected a list"):
        prepare_qat_fx(Chain(), QAT, hybrid=True, hybrid_dict={key: "second"})
