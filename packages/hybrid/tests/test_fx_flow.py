"""Fusing, replacing, placing and preparing of traced models."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.quantization import DeQuantStub

import bevquant_hybrid as horizon
from bevquant_hybrid.nn import qat
from bevquant_hybrid.quantization import (
    QuantStub,
    convert_fx,
    fuse_fx,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    get_default_qconfig,
    prepare_calibration_fx,
    prepare_qat_fx,
    set_fake_quantize,
)

QAT, OUT, CALIB = (
    get_default_qat_qconfig(),
    get_default_qat_out_qconfig(),
    get_default_calib_qconfig(),
)


class Block(nn.Module):
    """A residual block that adds by +, and reuses its ReLU."""

    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.swapped = swapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(x + y if self.swapped else y + x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 1), Block(), Block(swapped=True))
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.features(self.quant(x))
        z = torch.cat([F.max_pool2d(y, 2), F.interpolate(torch.sigmoid(y), scale_factor=0.5)], 1)
        return self.dequant(self.head(z.mean((2, 3), keepdim=True) * 2 + 0.25))


def settled(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def test_additions_are_fused_whichever_argument_the_convolution_is() -> None:
    model = settled(Net())
    x = torch.randn(2, 3, 8, 8)
    fused = fuse_fx(model)
    added = [n for n, m in fused.named_modules() if type(m).__name__ == "ConvAddReLU2d"]
    assert added == ["features_1_generated_add_0", "features_2_generated_add_0"]
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fused.modules())
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)


def test_operators_are_numbered_in_the_order_of_execution() -> None:
    class Sums(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            z = x + y
            z = torch.add(z, y) * x
            z = z.add(y) - x
            return z.reshape(x.size(0), x.shape[1] * 2 // 2)

    fused = fuse_fx(Sums())
    names = [name for name, _ in fused.named_children()]
    assert names == [
        "_generated_add_0",
        "_generated_add_1",
        "_generated_mul_0",
        "_generated_add_2",
        "_generated_sub_0",
    ]
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    assert torch.equal(fused(x, y), Sums()(x, y))


def test_a_single_addition_prints_as_documented() -> None:
    class Sum(nn.Module):
        def forward(self, x, y):
            return x + y

    code = fuse_fx(Sum()).code
    assert "_generated_add_0 = self._generated_add_0" in code
    assert "add_1 = _generated_add_0.add(x, y)" in code


def test_what_must_not_be_fused_is_not() -> None:
    class Traps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.two_readers = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
            self.bn, self.bn_behind_relu = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
            self.conv = nn.Conv2d(2, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.shared(F.relu(self.shared(x)))
            y = self.two_readers(y)
            y = y * self.bn(y)
            return self.bn_behind_relu(F.relu(self.conv(y)))

    model = settled(Traps())
    x = torch.randn(1, 2, 4, 4)
    fused = fuse_fx(model)
    assert type(fused.conv).__name__ == "ConvReLU2d"
    assert type(fused.shared) is nn.Conv2d
    assert type(fused.bn) is type(fused.bn_behind_relu) is nn.BatchNorm2d
    torch.testing.assert_close(fused(x), model(x))


def test_what_is_used_twice_is_not_fused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.tied, self.bn = (
                nn.Conv2d(2, 2, 1),
                nn.Conv2d(2, 2, 1),
                nn.BatchNorm2d(2),
            )
            self.sum = nn.quantized.FloatFunctional()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.sum.add(self.conv(x), x)
            y = self.bn(self.tied(self.sum.add(y, y)))
            return F.conv2d(y, self.tied.weight)

    model = settled(Twice())
    x = torch.randn(1, 2, 4, 4)
    fused = fuse_fx(model)
    assert type(fused.sum) is nn.quantized.FloatFunctional
    assert type(fused.bn) is nn.BatchNorm2d
    torch.testing.assert_close(fused(x), model(x))
    again = fuse_fx(fused)
    assert again.code == fused.code
    assert type(again).__name__ == "Twice"


def test_a_model_fused_before_is_prepared_like_one_that_is_not() -> None:
    model = settled(Net())
    x = torch.randn(2, 3, 8, 8)
    before, after = trained(fuse_fx(model), x), trained(model, x)
    assert torch.equal(before(x), after(x))


def trained(model: nn.Module, x: torch.Tensor, **settings) -> nn.Module:
    calibrated = prepare_calibration_fx(model, {"": CALIB}, **settings).eval()
    calibrated(x)
    made = prepare_qat_fx(calibrated, {"": QAT, "module_name": [("head", OUT)]}, **settings)
    set_fake_quantize(made, "validation")
    return made.eval()


def test_a_whole_network_stays_near_its_float_model_and_its_integers_nearer() -> None:
    model = settled(Net())
    x = torch.randn(4, 3, 16, 16)
    expected = model(x)
    made = trained(model, x)
    kinds = {n: type(m) for n, m in made.named_modules()}
    assert kinds["features_2_generated_add_0"] is qat.ConvAddReLU2d
    assert kinds["_generated_sigmoid_0"] is qat.SegmentLUT
    result, integers = made(x), convert_fx(made)(x)
    assert (result - expected).norm() < 0.1 * expected.norm()
    step = made.get_submodule("_generated_add_scalar_0").activation_post_process.scale.item()
    gain = model.head.weight.abs().sum((1, 2, 3)).max().item()
    assert (integers - result).abs().max() <= 2.01 * step * gain


def test_the_float_model_is_left_alone() -> None:
    model = settled(Net())
    x = torch.randn(2, 3, 8, 8)
    before, state = model(x), {k: v.clone() for k, v in model.state_dict().items()}
    trained(model, x)
    assert torch.equal(model(x), before)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.features[1].relu.inplace


def test_no_qconfig_anywhere_is_the_float_model() -> None:
    model = settled(Net())
    x = torch.randn(2, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = prepare_qat_fx(model)
    torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-5)


def test_qconfig_precedence() -> None:
    layers = [nn.Conv2d(1, 1, 1) for _ in range(5)]
    model = nn.Sequential(QuantStub(), *layers[:4], nn.Sequential(layers[4]))

    def of(bound: float):
        return get_default_qat_qconfig(activation_qkwargs={"averaging_constant": bound})

    model.get_submodule("4").qconfig = of(0.4)
    made = prepare_qat_fx(
        model,
        {
            "": of(0.1),
            "module_type": [(nn.Conv2d, of(0.2))],
            "module_name": {"2": of(0.3), "4": of(0.3), "3": OUT, "5": of(0.5)},
        },
    )
    constants = {
        name: module.activation_post_process.activation_post_process.averaging_constant
        for name, module in made.named_modules()
        if isinstance(module, qat.Conv2d | qat.QuantStub) and module.activation_post_process
    }
    assert constants == {"0": 0.1, "1": 0.2, "2": 0.3, "4": 0.4, "5.0": 0.2}


def test_calibration_passes_values_unrounded_through_every_function() -> None:
    class Functions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant = QuantStub()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.interpolate(self.quant(x), scale_factor=2.0, mode="bilinear")
            return F.pad(F.relu6(y).clamp(0.3, 0.8).abs(), (1, 1), value=0.2)

    x = torch.rand(1, 2, 4, 4)
    calibrating = prepare_calibration_fx(Functions(), {"": CALIB})
    newer = prepare_qat_fx(Functions(), {"": QAT})
    set_fake_quantize(newer, "calibration")
    for model in (calibrating, newer):
        torch.testing.assert_close(model(x).dequantize(), Functions()(x))


@pytest.mark.parametrize("kind", ["lsq", "pact"])
def test_learned_scales_are_those_of_the_integers(kind: str) -> None:
    weight = "lsq" if kind == "lsq" else "fake_quant"
    qconfig = get_default_qat_qconfig(activation_fake_quant=kind, weight_fake_quant=weight)
    model = nn.Sequential(QuantStub(), nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Conv2d(3, 2, 1))
    made = prepare_qat_fx(model, {"": qconfig})
    x = torch.randn(4, 2, 5, 5)
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    for _ in range(5):
        made(x).dequantize().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if kind == "lsq":
        with torch.no_grad():
            made.get_submodule("3").activation_post_process.scale.neg_()
    result, integers = made(x), convert_fx(made)(x)
    torch.testing.assert_close(result.scale, integers.scale)
    assert (result.int_repr().int() - integers.int_repr().int()).abs().max() <= 2


def test_the_newer_flow_with_one_fake_quantizer_for_all_stages() -> None:
    x = torch.randn(2, 3, 8, 8)
    calibrating = get_default_qconfig(activation_observer="percentile")
    training = get_default_qconfig(activation_qkwargs={"averaging_constant": 0.0})
    options = {"hybrid": True, "hybrid_dict": {"module_name": ["features.2"]}}
    float_model = settled(Net())
    first = prepare_qat_fx(copy.deepcopy(float_model), {"": calibrating}, **options).eval()
    set_fake_quantize(first, "calibration")
    torch.testing.assert_close(first(x), float_model(x), rtol=1e-4, atol=1e-4)
    second = prepare_qat_fx(copy.deepcopy(float_model), {"": training}, **options)
    second.load_state_dict(first.state_dict())
    set_fake_quantize(second, "qat")
    scale = second.head.activation_post_process.scale.clone()
    assert torch.equal(scale, first.head.activation_post_process.scale)
    second.train()(5 * x)
    assert torch.equal(second.head.activation_post_process.scale, scale)


@pytest.mark.parametrize(("march", "on_bpu"), [("bayes", True), ("bernoulli2", False)])
def test_the_march_decides_what_a_hybrid_model_has_on_the_bpu(march: str, on_bpu: bool) -> None:
    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.conv = QuantStub(), nn.Conv2d(1, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.quant(x)
            return self.conv(y) - y

    horizon.march.set_march(march)
    made = prepare_qat_fx(Difference(), {"": QAT}, hybrid=True)
    assert ("_generated_sub_0" in dict(made.named_children())) is on_bpu
    assert ("sub_input_dequant_0 = self.sub_input_dequant(conv)" in made.code) is not on_bpu
    assert made(torch.randn(1, 1, 2, 2)).shape == (1, 1, 2, 2)


def test_every_function_has_a_module_where_the_model_is_all_on_the_bpu() -> None:
    class Functions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.selu(self.quant(x)) ** 2 + torch.erf(self.quant(x))
            return self.dequant(F.softmax(F.gelu(y.tanh()) / 4, dim=1))

    x = torch.rand(2, 3, 4)
    made = prepare_qat_fx(Functions(), {"": QAT})
    made(x)
    called = dict.fromkeys(str(node.target) for node in made.graph.nodes)
    names = [n.removeprefix("_generated_") for n in called if n.startswith("_generated_")]
    assert names == [
        *("selu_0", "pow_0", "erf_0", "add_0", "tanh_0", "gelu_0", "mul_scalar_0", "softmax_0"),
    ]
    set_fake_quantize(made, "validation")
    assert (made(x) - Functions()(x)).abs().max() < 0.02
    assert (convert_fx(made)(x) - made(x)).abs().max() < 0.02


class Selu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.selu(x)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv0, self.conv1, self.head = (nn.Conv2d(2, 2, 1) for _ in range(3))
        self.selu = Selu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv0(self.quant(x))
        z = self.selu(y)
        w = self.conv1(z) + z.flatten(1).view(z.shape)
        return self.dequant(self.head(w)), F.selu(z)


def test_a_cpu_result_read_on_both_sides_is_quantized_for_the_bpu_alone() -> None:
    x = torch.randn(2, 2, 4, 4)
    model = Mixed()
    made = trained(model, x, hybrid=True)
    code = re.sub(r"\s*; .*", "", made.code)
    assert "selu_input_dequant_0 = self.selu_input_dequant(conv0)" in code
    assert "selu_activation_post_process = self.selu_activation_post_process(selu)" in code
    assert "_generated_add_0(selu_activation_post_process, view)" in code
    assert "flatten = selu_activation_post_process.flatten(1)" in code
    assert "selu_1 = torch.nn.functional.selu(selu, inplace = False)" in code
    head, side = made(x)
    assert head.dtype == side.dtype == torch.float32
    converted = convert_fx(made)(x)
    assert (converted[0] - head).abs().max() < 0.1


def test_names_of_modules_cover_what_is_inside_them() -> None:
    model = settled(Net())
    x = torch.randn(2, 3, 8, 8)
    made = trained(model, x, hybrid=True, hybrid_dict={"module_name": ["features.1"]})
    assert type(made.features[1].conv1).__name__ == "ConvReLU2d"
    assert type(made.get_submodule("features_1_generated_add_0")).__module__.endswith(
        "nn.intrinsic"
    )
    assert type(made.get_submodule("features_2_generated_add_0")) is qat.ConvAddReLU2d
    assert convert_fx(made)(x).shape == (2, 5, 1, 1)


def test_a_relu_on_the_cpu_is_not_fused() -> None:
    model = nn.Sequential(QuantStub(), nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Conv2d(1, 1, 1))
    made = prepare_qat_fx(model, {"": QAT}, hybrid=True, hybrid_dict={"module_type": [nn.ReLU]})
    kinds = [type(m) for m in made.children()]
    assert kinds[1:4] == [qat.Conv2d, nn.ReLU, qat.Conv2d]


def test_a_name_that_matches_nothing_warns_with_the_nearest() -> None:
    model = nn.Sequential(QuantStub())
    model.add_module("backbone", nn.Conv2d(1, 1, 1))
    with pytest.warns(UserWarning, match="no module is named 'bakbone'; nearest: backbone"):
        prepare_qat_fx(model, {"": QAT}, hybrid=True, hybrid_dict={"module_name": ["bakbone"]})


def test_a_layer_that_reads_a_float_input_warns_with_the_remedy() -> None:
    with pytest.warns(UserWarning, match=r"node _0 \(0\) is on the BPU but reads input.*QuantStub"):
        made = prepare_qat_fx(nn.Sequential(nn.Conv2d(1, 1, 1)), {"": QAT})
    with pytest.raises(TypeError, match=r"0 \(Conv2d\): its input is a float"):
        made(torch.ones(1, 1, 2, 2))


def test_a_layer_without_a_qconfig_warns() -> None:
    model = nn.Sequential(QuantStub(), nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1))
    with pytest.warns(UserWarning, match=r"\(2\) has no qconfig and stays float"):
        prepare_qat_fx(model, {"module_name": [("0", QAT), ("1", QAT)]}, hybrid=True)


def test_a_boundary_without_a_qconfig_is_refused_and_nothing_changed() -> None:
    model = Mixed()
    with pytest.raises(ValueError, match=r"node selu \(in selu\).*no qconfig with an activation"):
        prepare_qat_fx(model, {"": QAT, "module_name": [("selu", None)]}, hybrid=True)
    assert next(type(m) for m in model.children()) is QuantStub
    assert type(model.conv0) is nn.Conv2d


def test_control_flow_names_the_module_and_the_remedy() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    model = nn.Sequential(nn.Sequential(Branch()))
    with pytest.raises(ValueError, match=r"prepare_qat_fx: the forward of 0\.0 \(Branch\).*wrap"):
        prepare_qat_fx(model, {"": QAT})
    leaf = horizon.utils.fx_helper.wrap()(Branch)
    made = prepare_qat_fx(nn.Sequential(leaf()), {"": QAT})
    assert made(torch.tensor([-1.0])).tolist() == [1.0]


def test_preparing_twice_and_converting_a_calibration_are_refused() -> None:
    model = nn.Sequential(QuantStub(), nn.Conv2d(1, 1, 1))
    with pytest.raises(ValueError, match="prepared for quantization-aware training already"):
        prepare_qat_fx(prepare_qat_fx(model, {"": QAT}), {"": QAT})
    with pytest.raises(ValueError, match="get_default_qat_qconfig first"):
        convert_fx(prepare_calibration_fx(model, {"": CALIB}))
    with pytest.raises(TypeError, match="expected a model from prepare_qat_fx"):
        convert_fx(model)


def test_a_calibration_that_was_never_run_warns_of_every_scale() -> None:
    model = nn.Sequential(QuantStub(), nn.Conv2d(1, 1, 1))
    calibrated = prepare_calibration_fx(model, {"": CALIB})
    with pytest.warns(UserWarning, match="has not collected any statistics") as found:
        prepare_qat_fx(calibrated, {"": QAT})
    assert ["`0`" in str(w.message) or "`1`" in str(w.message) for w in found] == [True, True]


def test_without_a_march_nothing_is_prepared() -> None:
    horizon.march._chosen.clear()
    with pytest.raises(RuntimeError, match="prepare_qat_fx: no march is set"):
        prepare_qat_fx(nn.Sequential(nn.Conv2d(1, 1, 1)), {"": QAT})


def test_unknown_keys_are_refused() -> None:
    model = nn.Sequential(nn.ReLU())
    with pytest.raises(ValueError, match="unknown key 'modules'"):
        prepare_qat_fx(model, {"modules": []})
    with pytest.raises(ValueError, match="unknown key 'names'"):
        prepare_qat_fx(model, {}, hybrid=True, hybrid_dict={"names": []})
