"""check_qconfig and check_deploy_device beyond the documented examples; the curves' pages."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from bevquant_hybrid import march
from bevquant_hybrid.nn.quantized import FloatFunctional
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert_fx,
    fuse_fx,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    prepare_calibration,
    prepare_calibration_fx,
    prepare_qat_fx,
)
from bevquant_hybrid_tools.quant_profiler import (
    check_deploy_device,
    check_qconfig,
    featuremap_similarity,
    get_module_called_count,
)
from bevquant_hybrid_tools.quant_profiler._tables import curves_page

DATA = torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(7))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 128), DeQuantStub()
        self.conv, self.conv10 = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.prelu, self.aside = nn.PReLU(), nn.Conv2d(3, 3, 1)
        self.add, self.head = FloatFunctional(), nn.Conv2d(3, 2, 1)

    def forward(self, x):
        x = self.conv10(self.conv(self.quant(x)))
        x = self.aside(self.prelu(x))
        return self.dequant(self.head(self.add.add(x, x)))


def hybrid(calibration: bool = False) -> nn.Module:
    torch.manual_seed(0)
    get = get_default_calib_qconfig if calibration else get_default_qat_qconfig
    qconfigs: dict = {"": get()}
    if not calibration:
        qconfigs["module_name"] = [("head", get_default_qat_out_qconfig())]
    prepare = prepare_calibration_fx if calibration else prepare_qat_fx
    return prepare(Net(), qconfigs, hybrid=True, hybrid_dict={"module_name": ["aside"]})


def short(rows) -> list[tuple]:
    return [(row[0], *row[2:]) for row in rows]


def test_a_hybrid_model_lists_its_boundaries_and_float_layers(tmp_path, capsys) -> None:
    report = check_qconfig(hybrid(), DATA, out_dir=tmp_path)
    none, floats = "qconfig = None", "torch.float32"
    assert short(report.outputs) == [
        ("quant", floats, "qint8", -1),
        ("conv", "qint8", "qint8", -1),
        ("conv10", "qint8", "qint8", -1),
        ("prelu_input_dequant", "qint8", floats, none),
        ("prelu", floats, floats, none),
        ("aside", floats, floats, none),
        ("aside_activation_post_process", floats, "qint8", -1),
        ("add[add]", "['qint8', 'qint8']", "qint8", -1),
        ("head", "qint8", "qint32", none),
        ("dequant", "qint32", floats, none),
    ]
    assert short(report.weights) == [
        *(("conv", "qint8", 0), ("conv10", "qint8", 0), ("aside", floats, none)),
        ("head", "qint8", 0),
    ]
    assert short(report.messages) == [
        ("quant", "Fixed scale 0.0078125"),
        ("aside", "qconfig = None"),
        ("head", "output is not quantized"),
        ("head", "input dtype qint8 is not same with out dtype qint32"),
    ]
    assert (tmp_path / "qconfig_info.txt").read_text().endswith(capsys.readouterr().out)


def test_boundaries_of_a_calibrated_model_are_no_surprise(tmp_path, capsys) -> None:
    calibration = hybrid(calibration=True).eval()
    calibration(DATA)
    names = {"module_name": ["aside"]}
    qconfigs = {"": get_default_qat_qconfig()}
    model = prepare_qat_fx(calibration, qconfigs, hybrid=True, hybrid_dict=names)
    report = check_qconfig(model, DATA, out_dir=tmp_path)
    boundary = next(r for r in report.outputs if r[0] == "aside_activation_post_process")
    assert boundary[2:] == ("torch.float32", "qint8", -1)
    assert [row[0] for row in report.messages] == ["quant", "aside"]
    capsys.readouterr()


@pytest.mark.parametrize("fx", [True, False])
def test_calibration_models_are_checked(fx: bool, tmp_path, capsys) -> None:
    if fx:
        model = hybrid(calibration=True)
    else:
        plain = nn.Sequential(QuantStub(scale=1 / 128), nn.Conv2d(3, 3, 1), DeQuantStub())
        plain.qconfig = get_default_calib_qconfig()
        model = prepare_calibration(plain)
    report = check_qconfig(model, DATA, out_dir=tmp_path)
    assert short(report.messages)[0][1] == "Fixed scale 0.0078125"
    assert short(report.weights)[0][1:] == ("qint8", -1)  # nothing observes them yet
    capsys.readouterr()


def test_a_selection_and_a_check_of_ones_own(tmp_path, capsys) -> None:
    seen = []

    def own(module, args, result) -> None:
        seen.append((type(module).__name__, len(args), str(result.dtype)))

    names = [row[0] for row in check_qconfig(hybrid(), DATA, ("conv", "add"), (), own,
                                             tmp_path).outputs]  # fmt: skip
    assert names == ["conv", "add[add]"]
    assert seen == [("Conv2d", 1, "qint8"), ("FloatFunctional", 2, "qint8")]
    report = check_qconfig(hybrid(), DATA, types=(nn.PReLU,), out_dir=tmp_path)
    assert [row[0] for row in report.outputs] == ["prelu"]
    assert capsys.readouterr().out == ""
    assert "Please" not in (tmp_path / "qconfig_info.txt").read_text()


def test_models_without_fake_quantizers_are_refused(tmp_path) -> None:
    for model in (Net(), convert_fx(prepared())):
        with pytest.raises(ValueError, match="has no fake quantizer"):
            check_qconfig(model, DATA, out_dir=tmp_path)
    assert not list(tmp_path.iterdir())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.quant(x)
        return self.dequant(self.attention(x, x, x, need_weights=False)[0])


def test_an_operator_of_many_steps_is_many_or_one(tmp_path, capsys) -> None:
    torch.manual_seed(0)
    model, data = Attention().eval(), torch.rand(2, 5, 8)
    qat = prepare_qat_fx(model, {"": get_default_qat_qconfig()}).eval()
    qat(data)
    names = {row[0].partition("[")[0] for row in check_qconfig(qat, data, out_dir=tmp_path).outputs}
    assert {"attention.q_proj", "attention.softmax.exp", "attention.out_proj"} <= names
    assert "attention" not in names
    counts = get_module_called_count(qat, data, print_tabulate=False)
    assert counts["attention.q_proj"] == 1
    # Beside a float model, which has no steps, it is one operator; beside its like, many.
    rows = featuremap_similarity(model, qat, data, out_dir=tmp_path)
    assert [row[1] for row in rows] == ["quant", "attention", "dequant"]
    assert rows[1][7] <= 3
    again = featuremap_similarity(qat, convert_fx(qat), data, out_dir=tmp_path)
    assert "attention.softmax.mul" in [row[1] for row in again]
    capsys.readouterr()


def prepared(**settings) -> nn.Module:
    qat = prepare_qat_fx(Net(), {"": get_default_qat_qconfig()}, **settings)
    qat.eval()(DATA)
    return qat


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.dequant(self.conv(self.conv(self.quant(x))).flip(2))


def test_every_call_of_a_shared_module_has_a_row(tmp_path, capsys) -> None:
    qat = prepare_qat_fx(Shared(), {"": get_default_qat_qconfig()}, hybrid=True)
    assert check_deploy_device(qat, print_tabulate=False, out_dir=tmp_path) == {
        "quant": ("CPU", "module"),
        "conv": ("BPU", "module"),
        "conv(1)": ("BPU", "module"),
        "flip_input_dequant": ("CPU", "module"),
        "flip": ("CPU", "method"),
        "dequant": ("CPU", "module"),
    }
    assert capsys.readouterr().out == ""


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.left, self.right = nn.Conv2d(3, 3, 1), nn.AvgPool2d(1)
        self.sub = FloatFunctional()

    def forward(self, x):
        x = self.quant(x)
        return self.dequant(self.sub.sub(self.left(x), self.right(x)))


def test_a_boundary_before_several_inputs_is_one_row(tmp_path) -> None:
    names = {"module_name": ["sub"]}
    qconfigs = {"": get_default_qat_qconfig()}
    qat = prepare_qat_fx(TwoInputs(), qconfigs, hybrid=True, hybrid_dict=names)
    assert [n.name for n in qat.graph.nodes if "dequant_" in n.name] == [
        *("sub_1_input_dequant_0", "sub_1_input_dequant_1"),
    ]
    assert list(check_deploy_device(qat, False, tmp_path).items())[3:] == [
        ("sub_1_input_dequant", ("CPU", "module")),
        ("sub_1", ("CPU", "method")),
        ("dequant", ("CPU", "module")),
    ]


def test_devices_are_told_of_prepared_graphs_alone(tmp_path) -> None:
    for model in (Net(), fuse_fx(Net())):
        with pytest.raises(TypeError, match="from prepare_qat_fx or convert_fx"):
            check_deploy_device(model, out_dir=tmp_path)
    qat = prepared(hybrid=True)
    march._chosen.clear()
    with pytest.raises(RuntimeError, match="check_deploy_device: no march is set"):
        check_deploy_device(qat, out_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_pages_of_curves_stand_alone_and_name_every_point() -> None:
    values = [1.0, float("nan"), None, -2.5, float("inf"), 3.0]
    names = [f"layer<{i}>" for i in range(6)]
    page = curves_page("A & B", names, {"one": values, "two": [0.0] * 6})
    assert "A &amp; B" in page
    assert "http://www.w3.org/2000/svg" in page
    assert page.count("http") == 1
    told = re.findall(r"<title>(.*?)</title></circle>", page)
    assert told[:3] == [
        "layer&lt;0&gt;: one 1",
        "layer&lt;3&gt;: one -2.5",
        "layer&lt;5&gt;: one 3",
    ]
    assert len(told) == 9
    assert page.count("<polyline") == 4
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)" r="3" fill="#2a6f97"', page)]
    assert heights[1] > heights[0] > heights[2]  # downwards, as pictures count


@pytest.mark.parametrize(
    "values",
    [[], [None], [0.0], [1.0, 1.0 + 2e-16], [-1e30, 1e30], [1e-12, 2e-12], [5e6, 9e6], [1e20]],
)
def test_axes_of_any_range(values) -> None:
    page = curves_page("x", [str(i) for i in range(len(values))], {"y": values})
    assert "nan" not in page
    assert 2 <= page.count("<line ") <= 9
    places = [float(y) for y in re.findall(r'cy="([-\d.]+)"', page)]
    assert all(20 <= y <= 340 for y in places)
