"""check_model: what it returns, what it lists, and that every form of a model is taken."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_hybrid import march
from bevquant_hybrid.nn import MultiScaleRoIAlign
from bevquant_hybrid.nn.quantized import FloatFunctional
from bevquant_hybrid.operators import find_violations, trace_calls
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    check_model,
    convert,
    convert_fx,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    prepare_qat,
    prepare_qat_fx,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
PASSED = ["This model is supported!", "HBDK model check PASS"]


class Net(nn.Module):
    """Within the limits of BAYES; two of BERNOULLI2 are broken."""

    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 128), DeQuantStub()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 9), nn.MaxPool2d(2))
        self.pool, self.head = nn.AvgPool2d(8), nn.Conv2d(4, 10, 1)

    def forward(self, x):
        return self.dequant(self.head(self.pool(self.features(self.quant(x)))))


IMAGE = torch.linspace(-1, 0.99, 28 * 28).reshape(1, 1, 28, 28)


def trace(model, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, x)


def eager_forms():
    model = Net()
    yield model
    model.qconfig = get_default_qat_qconfig()
    model.head.qconfig = get_default_qat_out_qconfig()
    qat = prepare_qat(model)
    qat(IMAGE)
    yield qat
    converted = convert(qat.eval())
    yield converted
    yield trace(converted, IMAGE)


def fx_forms():
    qat = prepare_qat_fx(Net(), {"": get_default_qat_qconfig()})
    qat(IMAGE)
    yield qat
    converted = convert_fx(qat)
    yield converted
    yield trace(converted, IMAGE)


@pytest.fixture(scope="module")
def forms():
    """Float, prepared, converted and traced; the march is that of the module's tests."""
    march.set_march("bayes")
    return [*eager_forms(), *fx_forms()]


@pytest.mark.parametrize("give", [lambda x: x, lambda x: [x], lambda x: (x,)])
def test_every_form_passes_on_bayes(forms, give, capsys):
    for form in forms:
        assert check_model(form, give(IMAGE)) == 0
        assert capsys.readouterr().out.splitlines()[-2:] == PASSED


def test_every_violation_of_bernoulli2_is_listed_at_once_in_every_form(forms, capsys):
    tables = []
    for form in forms:
        assert check_model(form, IMAGE, march="bernoulli2") == 1
        lines = capsys.readouterr().out.splitlines()
        start = lines.index("2 conditions of BERNOULLI2 are not met:")
        assert lines[-1] == "HBDK model check FAIL"
        tables.append(lines[start + 1 : -1])
    assert all(table == tables[0] for table in tables)
    head, conv, pool = (line.split("  ") for line in tables[0])
    cells = [[cell.strip() for cell in line if cell.strip()] for line in (head, conv, pool)]
    assert cells[0] == ["module", "operator", "constraint", "value", "expected", "what to do"]
    assert cells[1][:5] == ["features.0", "torch.nn.Conv2d", "kernel_size", "9", "kernel_size <= 7"]
    assert cells[2][:4] == ["pool", "torch.nn.AvgPool2d", "kernel_size", "8"]
    assert cells[2][4] == "1 <= kernel_size <= 7"


def test_the_march_of_the_process_counts_unless_one_is_given(forms, capsys):
    march.set_march("bernoulli2")
    assert check_model(forms[0], IMAGE) == 1
    assert check_model(forms[0], IMAGE, march="BAYES_E") == 0
    march._chosen.clear()
    with pytest.raises(ValueError, match="check_model: march=None and no march is set"):
        check_model(forms[0], IMAGE)
    with pytest.raises(ValueError, match="march='nash'"):
        check_model(forms[0], IMAGE, march="nash")


def test_remarks_on_precision_are_advice_and_no_failure(capsys):
    model = nn.Sequential(QuantStub(), nn.Softmax(1), nn.Softmax(2))
    assert check_model(model, torch.rand(1, 3, 4, 4)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("advice: 1, 2: ")
    assert "precision" in lines[0]
    assert lines[-2:] == PASSED


def test_slow_layers_are_named_beyond_the_threshold_alone(tools, capsys):
    model = nn.Sequential(QuantStub(), nn.Conv2d(64, 64, 1), nn.Conv2d(64, 2, 1))
    x = torch.rand(1, 64, 64, 64)
    assert check_model(model, x) == 0
    assert "wait" not in capsys.readouterr().out
    # 64·64·(64 + 64) + 64·64 + 4·64 bytes at 11.03 GB/s, less 2·64·64·64·64 operations at 64 TOPS.
    waits = 528_640 / 11.03e3 - 33_554_432 / 64e6
    assert check_model(model, x, advice=30) == 0
    out = capsys.readouterr().out
    assert "wait for memory for more than 30 us (an estimate)" in out
    [row] = [line for line in out.splitlines() if line.startswith("1  ")]
    assert row.split()[2:4] == [f"{waits:.1f}", "528,640"]
    assert not [line for line in out.splitlines() if line.startswith("2  ")]
    assert check_model(model, x, advice=10_000) == 0
    assert "no layer waits for memory for more than 10000 us" in capsys.readouterr().out


class Hybrid(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.act, self.last = nn.Conv2d(1, 2, 1), nn.PReLU(), nn.Conv2d(2, 1, 1)

    def forward(self, x):
        return self.dequant(self.last(self.act(self.first(self.quant(x)))))


def test_hybrid_models_are_refused_with_what_runs_on_the_cpu():
    qat = prepare_qat_fx(Hybrid(), {"": get_default_qat_qconfig()}, hybrid=True)
    qat(IMAGE)
    converted = convert_fx(qat)
    for form in (qat, converted, trace(converted, IMAGE)):
        with pytest.raises(ValueError, match=r"hybrid: on the CPU.*act \(torch.nn.PReLU\)"):
            check_model(form, IMAGE)


def test_a_model_prepared_as_hybrid_that_the_bpu_runs_alone_is_checked():
    qat = prepare_qat_fx(Net(), {"": get_default_qat_qconfig()}, hybrid=True)
    qat(IMAGE)
    assert check_model(convert_fx(qat), IMAGE) == 0


def test_a_float_operator_of_a_float_model_is_a_violation(capsys):
    assert check_model(nn.Sequential(nn.Conv2d(1, 2, 1)), IMAGE) == 1
    assert "insert a QuantStub before it" in capsys.readouterr().out


def test_a_camera_needs_its_scale(forms, capsys):
    for source in ("pyramid", ["resizer"]):
        for form in forms:
            assert check_model(form, IMAGE, input_source=source) == 0
    other = nn.Sequential(QuantStub(scale=1 / 64), nn.Conv2d(1, 1, 1))
    assert check_model(other, IMAGE) == 0
    capsys.readouterr()
    assert check_model(other, IMAGE, input_source="pyramid") == 1
    line = capsys.readouterr().out.splitlines()[-2]
    assert "0.015625" in line
    assert "1/128, as its input comes from the pyramid" in line
    assert check_model(nn.Sequential(QuantStub()), IMAGE, input_source="pyramid") == 1
    assert "not fixed" in capsys.readouterr().out


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.map, self.add = QuantStub(1 / 128), QuantStub(1.0), FloatFunctional()

    def forward(self, x, y):
        return self.add.add(self.image(x), self.map(y))


def test_sources_are_those_of_each_input():
    inputs = [IMAGE, IMAGE]
    assert check_model(Two(), inputs, input_source=["pyramid", "ddr"]) == 0
    assert check_model(Two(), inputs, input_source=["ddr", "pyramid"]) == 1
    with pytest.raises(ValueError, match="3 sources for 2 inputs"):
        check_model(Two(), inputs, input_source=["ddr"] * 3)
    with pytest.raises(ValueError, match="input_source='camera'"):
        check_model(Two(), inputs, input_source="camera")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_mean_nothing_are_violations(bad, capsys):
    *_, converted, _script = eager_forms()
    converted.pool.scale.fill_(bad)
    for form in (converted, trace_again(converted)):
        assert check_model(form, IMAGE, check_quanti_param=True) == 1
        line = capsys.readouterr().out.splitlines()[-2]
        assert line.split()[:3] == ["pool", "AvgPool2d", "scale"]
        assert str(bad) in line
    assert find_violations(trace_calls(Net(), IMAGE), "bayes") == []


def trace_again(converted):
    good = converted.pool.scale.clone()
    converted.pool.scale.fill_(1.0)
    script = trace(converted, IMAGE)
    script.pool.scale.copy_(good)
    converted.pool.scale.copy_(good)
    return script


def test_what_has_seen_no_values_is_advice(capsys):
    model = nn.Sequential(QuantStub(), nn.Conv2d(1, 1, 1), nn.MaxPool2d(2))
    model.qconfig = get_default_qat_qconfig()
    qat = prepare_qat(model)
    qat(IMAGE)
    assert check_model(qat, IMAGE) == 0
    assert "seen" not in capsys.readouterr().out
    assert check_model(prepare_qat(model), IMAGE) == 0
    assert "1 has seen no values yet" in capsys.readouterr().out


def test_functions_are_checked_like_modules(capsys):
    class Resized(nn.Module):
        def __init__(self):
            super().__init__()
            self.quant = QuantStub()

        def forward(self, x):
            return F.interpolate(self.quant(x), scale_factor=2, mode="bicubic")

    assert check_model(Resized(), IMAGE) == 1
    assert "'bicubic'" in capsys.readouterr().out


def test_what_is_no_model_or_does_not_run_is_named():
    with pytest.raises(TypeError, match="check_model: expected a module, got function"):
        check_model(lambda x: x, IMAGE)
    with pytest.raises(TypeError, match="check_model: example_inputs is a str"):
        check_model(Net(), "x")
    with pytest.raises(RuntimeError, match=r"features\.0 does not run on the example inputs"):
        check_model(Net(), torch.rand(1, 2, 28, 28))


def test_the_model_stays_as_it_was(tools, forms):
    for form in forms:
        before = {name: value.clone() for name, value in form.state_dict().items()}
        training = form.training
        check_model(form, torch.rand(1, 1, 28, 28) * 9, advice=0)
        assert form.training == training
        after = form.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())


UPSAMPLING = {
    "nearest": (nn.UpsamplingNearest2d(scale_factor=2), 0),
    "nearest, to a size": (nn.UpsamplingNearest2d(size=(9, 9)), 0),
    "bilinear": (nn.UpsamplingBilinear2d(scale_factor=2), 0),
    "argument not given": (nn.Upsample(scale_factor=2), 1),
    "argument given": (nn.Upsample(scale_factor=2, recompute_scale_factor=True), 0),
    "corners": (nn.Upsample(size=(9, 9), mode="bilinear", align_corners=True), 1),
}


@pytest.mark.parametrize("name", UPSAMPLING)
def test_conditions_on_arguments_hold_where_a_class_has_them(name, capsys):
    layer, on_bayes = UPSAMPLING[name]
    x = torch.rand(1, 4, 4, 4)
    model = nn.Sequential(QuantStub(scale=1 / 128), layer, DeQuantStub())
    assert check_model(model, x, march="bernoulli2") == 0
    assert check_model(model, x, march="bayes") == on_bayes
    assert ("align_corners" in capsys.readouterr().out) == (name in ("bilinear", "corners"))
    converted = convert_fx(prepare_qat_fx(model, {"": get_default_qat_qconfig()}))
    for form in (converted, trace(converted, x)):
        assert check_model(form, x, march="bayes") == on_bayes


def test_sizes_of_upsampling_are_limited_without_its_arguments(capsys):
    model = nn.Sequential(QuantStub(), nn.UpsamplingNearest2d(size=(1, 1)), DeQuantStub())
    assert check_model(model, torch.rand(1, 8193, 2, 2), march="bayes") == 1
    assert "1 <= channels <= 8192" in capsys.readouterr().out
    assert check_model(model, torch.rand(1, 1, 256, 256), march="bernoulli2") == 1
    assert "resize" in capsys.readouterr().out


class Boxes(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(3, 4, 1)
        self.align = MultiScaleRoIAlign((2, 2), [1])

    def forward(self, x, boxes):
        return self.dequant(self.align([self.conv(self.quant(x))], [boxes]))


def test_boxes_may_be_floats_beside_quantized_maps():
    x, boxes = torch.rand(1, 3, 16, 16), torch.tensor([[[1.0, 1.0, 5.0, 6.0]]])
    qat = prepare_qat_fx(Boxes(), {"": get_default_qat_qconfig()})
    qat(x, boxes)
    for form in (Boxes(), qat, convert_fx(qat)):
        for name in ("bernoulli2", "bayes"):
            assert check_model(form, (x, boxes), march=name) == 0
