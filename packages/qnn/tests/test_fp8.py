"""FP8 in quantized models: layers, plans, sensitivity, training, sizes."""

import copy

import pytest
import torch
from torch import nn

from bevquant_qnn import (
    PrecisionPlan,
    QuantConfig,
    apply_precision,
    assign_precision,
    estimate_sensitivity,
    freeze,
    learn_ranges,
    quantize_model,
    round_weights,
    sensitivity,
    weight_size,
)
from bevquant_qnn._assign_precision import Budget
from bevquant_quantizers import calibrate, fake_quantize


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x).relu()
        x = (x + self.second(x)).relu()
        return self.head(x.mean((2, 3)))


def calibrated(config=None, seed=0):
    torch.manual_seed(seed)
    images = torch.randn(4, 3, 8, 8)
    model = quantize_model(Residual().eval(), config, images).model
    calibrate(model, [images], method="mse")
    return model, images


def test_layers_compute_with_fp8_numbers():
    model, images = calibrated(QuantConfig(num_bits=(4, 3)))
    layer = model.first
    weight = layer.weight.detach()
    q = fake_quantize(weight, weight.abs().amax((1, 2, 3), keepdim=True), (4, 3))
    x = fake_quantize(images, layer.input_quantizer.amax, (4, 3))
    wanted = nn.functional.conv2d(x, q, layer.bias, padding=1)
    torch.testing.assert_close(layer(images), wanted, rtol=1e-6, atol=1e-6)
    assert model.residual_quantizer.num_bits == (4, 3)
    assert freeze(model)


def test_configuration_goes_to_json_and_back():
    for config in (QuantConfig(num_bits=(4, 3)), QuantConfig(weight_bits=(5, 2))):
        assert QuantConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match=r"\(4, 3\) or \(5, 2\)"):
        QuantConfig(num_bits=(3, 4))


def test_a_plan_mixes_formats_and_searches_ranges_again():
    model, _ = calibrated()
    ranges = {p: q.amax.clone() for p, q in model.named_modules() if hasattr(q, "_amax")}
    plan = PrecisionPlan.by_hand(model, {"first": "fp8", "head": "int4"})
    assert PrecisionPlan.from_json(plan.to_json()) == plan
    assert any("FP8" in s.reason for s in plan.other_than_int8())
    apply_precision(model, plan)
    assert model.first.input_quantizer.num_bits == (4, 3)
    assert model.first.weight_quantizer.num_bits == (4, 3)
    assert model.head.weight_quantizer.num_bits == 4
    found = model.first.input_quantizer
    assert float(found.amax) == float(found._calibrator.compute_amax("mse"))
    assert float(found.amax) != float(ranges["first._input_quantizer"])
    apply_precision(model, PrecisionPlan.by_hand(model, {}))
    for path, amax in ranges.items():
        assert torch.equal(model.get_submodule(path).amax, amax), path


def test_sensitivity_and_assignment_know_fp8():
    model, images = calibrated()
    table = sensitivity(model, [images], precisions=("int8", "fp8"))
    for row in table:
        assert 15 < row.alone["fp8"] < 60
    estimate = estimate_sensitivity(model, [images], precisions=("fp8",))
    for row in estimate:
        assert abs(row.alone["fp8"] - table[row.name].alone["fp8"]) < 6
    plan = assign_precision(model, table, Budget(time=1.0), costs={"int8": 1.0, "fp8": 0.5})
    assert {g.precision for g in plan} == {"fp8"} or "int8" in {g.precision for g in plan}
    fastest = min(
        g.precision
        for g in assign_precision(model, table, Budget(time=0.5), costs={"int8": 1.0, "fp8": 0.5})
    )
    assert fastest == "fp8"


def test_own_precision_is_found():
    model, images = calibrated(QuantConfig(num_bits=(4, 3)))
    table = sensitivity(model, [images], without=False)
    assert all(set(row.alone) == {"fp8"} for row in table)
    mixed, images = calibrated(QuantConfig(num_bits=(5, 2)))
    with pytest.raises(ValueError, match=r"\(5, 2\)"):
        sensitivity(mixed, [images])


def test_training_moves_weights_and_learned_ranges():
    model, images = calibrated(QuantConfig(num_bits=(4, 3)))
    model.train()
    ranges = learn_ranges(model)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model(images).square().sum().backward()
    assert all(r.grad is not None and bool(r.grad.isfinite().all()) for r in ranges)
    optimizer.step()
    assert not torch.equal(before["first.weight"], model.first.weight)
    freeze(model)


def test_learned_ranges_get_the_gradient_of_the_scale():
    """d/ds s·FP8(x/s) by the rounding's straight-through: FP8(x/s) − x/s within the range."""
    from bevquant_qnn._training_ranges import lsq

    x, amax = torch.tensor([0.3, 900.0]), torch.tensor(448.0, requires_grad=True)
    lsq(x, amax, (4, 3)).sum().backward()
    inside = float(fake_quantize(x[:1], torch.tensor(448.0), (4, 3)) - x[0])
    expected = (inside + 448.0) * 448 / (2 * 448) ** 0.5
    assert float(amax.grad) == pytest.approx(expected, rel=1e-6)


def test_sizes_and_rounding():
    model, images = calibrated(QuantConfig(num_bits=(4, 3)))
    integers, _ = calibrated()
    assert weight_size(model) == weight_size(integers)
    result = round_weights(model, [images])
    assert result.layers
    assert result.skipped == ()
    assert all(layer.error <= layer.nearest for layer in result.layers)


def test_biases_do_not_widen_ranges():
    layer = quantize_model(nn.Sequential(nn.Linear(2, 2)), QuantConfig(num_bits=(4, 3))).model[0]
    layer.weight.data[:] = 1e-6
    layer.bias.data[:] = 100.0
    layer.input_quantizer.amax = 1.0
    layer.weight_quantizer.amax = [[1e-6], [1e-6]]
    layer.settle_ranges()
    assert layer.weight_quantizer.amax.flatten().tolist() == pytest.approx([1e-6, 1e-6])
