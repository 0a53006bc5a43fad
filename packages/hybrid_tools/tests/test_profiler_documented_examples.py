"""The profiler's documented examples, and the tables that the documents print for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.quantization import DeQuantStub, QuantStub

import bevquant_hybrid as horizon
from bevquant_hybrid import nn as horizon_nn
from bevquant_hybrid.dtype import qint16
from bevquant_hybrid.march import March, set_march
from bevquant_hybrid.nn import qat
from bevquant_hybrid.nn.quantized import FloatFunctional
from bevquant_hybrid.quantization import (
    convert_fx,
    fuse_modules,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    get_default_qconfig,
    prepare_calibration_fx,
    prepare_qat,
    prepare_qat_fx,
)
from bevquant_hybrid.quantization.observer import FixedScaleObserver
from bevquant_hybrid.quantization.qconfig import (
    default_qat_8bit_fake_quant_qconfig,
    default_qat_out_8bit_fake_quant_qconfig,
)
from bevquant_hybrid_tools.quant_profiler import (
    check_deploy_device,
    check_qconfig,
    check_unfused_operations,
    featuremap_similarity,
    get_module_called_count,
    get_raw_features,
    profile_featuremap,
    set_preserve_qat_mode,
)

pytestmark = pytest.mark.filterwarnings("ignore:Implicit dimension choice for softmax")


def rows_of(table: str) -> list[list[str]]:
    """Cells of a table between bars, without its titles."""
    lines = [line.strip() for line in table.strip().splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("|-"))
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[start + 1 :]
        if line.startswith("|")
    ]


def documented(table: str) -> list[list[str]]:
    """Rows as the document prints them, its classes given as this package's."""
    rows = [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
    for row in rows:
        row[1] = f"<class 'bevquant_hybrid.nn.{row[1]}'>"
    return rows


class Conv2dModule(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv2d = nn.Conv2d(inputs, outputs, 1)
        self.add = FloatFunctional()
        self.bn_mod = nn.BatchNorm2d(outputs)
        self.relu_mod = nn.ReLU()

    def forward(self, x, y):
        return self.relu_mod(self.add.add(self.bn_mod(self.conv2d(x)), y))

    def fuse_model(self) -> None:
        fuse_modules(self, ["conv2d", "bn_mod", "add", "relu_mod"], inplace=True)


class FuseNet(nn.Module):
    """The document's TestFuseNet; with the stubs that its printed tables have."""

    def __init__(self, channels: int, stubs: bool = False) -> None:
        super().__init__()
        self.quantx = QuantStub() if stubs else nn.Identity()
        self.quanty = QuantStub() if stubs else nn.Identity()
        self.convmod1 = Conv2dModule(channels, channels)
        self.convmod2 = Conv2dModule(channels, channels)
        self.convmod3 = Conv2dModule(channels, channels)
        self.shared_conv = nn.Conv2d(channels, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.bn2 = nn.BatchNorm2d(channels)
        self.sub = FloatFunctional()
        self.relu = nn.ReLU()

    def forward(self, x, y):
        x, y = self.quantx(x), self.quanty(y)
        x = self.convmod1(x, y)
        x = self.convmod2(y, x)
        x = self.convmod3(x, y)
        x = self.bn1(self.shared_conv(x))
        y = self.bn2(self.shared_conv(y))
        return self.relu(self.sub.sub(x, y))

    def fuse_model(self) -> None:
        self.convmod1.fuse_model()
        self.convmod3.fuse_model()


UNFUSED = """\
name                 type
-------------------  ------------------------------------------------
shared_conv(shared)  <class 'torch.nn.modules.conv.Conv2d'>
bn1                  <class 'torch.nn.modules.batchnorm.BatchNorm2d'>

name                 type
-------------------  ------------------------------------------------
shared_conv(shared)  <class 'torch.nn.modules.conv.Conv2d'>
bn2                  <class 'torch.nn.modules.batchnorm.BatchNorm2d'>

name               type
-----------------  --------------------------------------------------------------------------------
convmod2.conv2d    <class 'torch.nn.modules.conv.Conv2d'>
convmod2.bn_mod    <class 'torch.nn.modules.batchnorm.BatchNorm2d'>
convmod2.add       <class 'horizon_plugin_pytorch.nn.quantized.functional_modules.FloatFunctional'>
convmod2.relu_mod  <class 'torch.nn.modules.activation.ReLU'>
"""


def test_unfused_operations_print_as_documented(capsys) -> None:
    net = FuseNet(5)
    net.fuse_model()
    found = check_unfused_operations(net, (torch.rand(2, 5, 6, 7), torch.rand(2, 5, 6, 7)))
    theirs = "horizon_plugin_pytorch.nn.quantized.functional_modules.FloatFunctional"
    ours = theirs.replace("horizon_plugin_pytorch", "bevquant_hybrid")
    expected = UNFUSED.replace(theirs, ours).replace("-" * 80, "-" * len(f"<class '{ours}'>"))
    assert capsys.readouterr().out == expected
    assert found == [
        ["shared_conv(shared)", "bn1"],
        ["shared_conv(shared)", "bn2"],
        ["convmod2.conv2d", "convmod2.bn_mod", "convmod2.add", "convmod2.relu_mod"],
    ]


OUTPUTS = """\
quantx            | qat.stubs.QuantStub                    | torch.float32      | qint8  | -1
quanty            | qat.stubs.QuantStub                    | torch.float32      | qint8  | -1
convmod1.add      | qat.conv2d.ConvAddReLU2d               | ['qint8', 'qint8'] | qint8  | -1
convmod2.conv2d   | qat.conv2d.Conv2d                      | qint8              | qint8  | -1
convmod2.bn_mod   | qat.batchnorm.BatchNorm2d              | qint8              | qint8  | -1
convmod2.add[add] | qat.functional_modules.FloatFunctional | ['qint8', 'qint8'] | qint8  | -1
convmod2.relu_mod | qat.relu.ReLU                          | qint8              | qint8  | qconfig = None
convmod3.add      | qat.conv2d.ConvAddReLU2d               | ['qint8', 'qint8'] | qint8  | -1
shared_conv       | qat.conv2d.Conv2d                      | qint8              | qint8  | -1
bn1               | qat.batchnorm.BatchNorm2d              | qint8              | qint8  | -1
shared_conv(1)    | qat.conv2d.Conv2d                      | qint8              | qint8  | -1
bn2               | qat.batchnorm.BatchNorm2d              | qint8              | qint8  | -1
sub[sub]          | qat.functional_modules.FloatFunctional | ['qint8', 'qint8'] | qint16 | -1
relu              | qat.relu.ReLU                          | qint16             | qint16 | qconfig = None
"""  # noqa: E501

WEIGHTS = """\
convmod1.add    | qat.conv2d.ConvAddReLU2d | qint16 | 0
convmod2.conv2d | qat.conv2d.Conv2d        | qint16 | 0
convmod3.add    | qat.conv2d.ConvAddReLU2d | qint16 | 0
shared_conv     | qat.conv2d.Conv2d        | qint16 | 0
shared_conv(1)  | qat.conv2d.Conv2d        | qint16 | 0
"""

MESSAGES = """\
convmod1.add    | qat.conv2d.ConvAddReLU2d | qint16 weight!!!
convmod2.conv2d | qat.conv2d.Conv2d        | qint16 weight!!!
convmod3.add    | qat.conv2d.ConvAddReLU2d | qint16 weight!!!
shared_conv     | qat.conv2d.Conv2d        | qint16 weight!!!
shared_conv(1)  | qat.conv2d.Conv2d        | qint16 weight!!!
sub[sub] | qat.functional_modules.FloatFunctional | input dtype ['qint8', 'qint8'] is not same \
with out dtype qint16
sub[sub] | qat.functional_modules.FloatFunctional | Fixed scale 3.0517578125e-05
"""


def test_qconfigs_are_listed_as_documented(tmp_path, capsys) -> None:
    net = FuseNet(3, stubs=True)
    net.fuse_model()
    per_channel = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0}
    net.qconfig = get_default_qconfig(weight_qkwargs={**per_channel, "dtype": qint16})
    net.sub.qconfig = get_default_qconfig(
        activation_qkwargs={"observer": FixedScaleObserver, "scale": 1 / 2**15, "dtype": qint16}
    )
    data = torch.rand(2, 3, 11, 12)
    report = check_qconfig(prepare_qat(net), (data, data), out_dir=tmp_path)
    text = (tmp_path / "qconfig_info.txt").read_text()
    outputs, weights, messages = text.split("\n\n")
    assert outputs.startswith("Each layer out qconfig:\n")
    assert rows_of(outputs) == documented(OUTPUTS)
    assert weights.startswith("Weight qconfig:\n")
    assert rows_of(weights) == documented(WEIGHTS)
    assert messages.startswith("Please check if these OPs qconfigs are expected..\n")
    assert rows_of(messages) == documented(MESSAGES)
    assert capsys.readouterr().out == messages
    assert [list(row) for row in report.messages] == documented(MESSAGES)


class Net(nn.Module):
    """The network of the documents' other tables."""

    def __init__(self, quant: bool = False) -> None:
        super().__init__()
        self.quant_stubx = QuantStub()
        self.quant_stuby = QuantStub()
        self.unused = nn.ReLU()
        self.mul_op = FloatFunctional()
        self.cat_op = FloatFunctional()
        self.quantized_ops = nn.Sequential(
            nn.ReLU(),
            nn.Sigmoid(),
            nn.Softmax(),
            nn.SiLU(),
            horizon_nn.Interpolate(scale_factor=2, recompute_scale_factor=True),
            horizon_nn.Interpolate(scale_factor=2.3, recompute_scale_factor=True),
            nn.AvgPool2d(kernel_size=4),
            nn.Upsample(scale_factor=1.3, mode="bilinear"),
            nn.UpsamplingBilinear2d(scale_factor=0.7),
        )
        self.dequant_stub = DeQuantStub()
        self.float_ops = nn.Sequential(
            nn.Tanh(), nn.LeakyReLU(), nn.PReLU(), nn.UpsamplingNearest2d(scale_factor=0.7)
        )
        self.quant = quant

    def forward(self, x, y):
        x, y = self.quant_stubx(x), self.quant_stuby(y)
        z = self.mul_op.mul(x, y)
        x = self.cat_op.cat((x, z), 1)
        x = self.cat_op.cat((x, y), dim=1)
        x = self.dequant_stub(self.quantized_ops(x))
        return x if self.quant else self.float_ops(x)


CALLED = """\
name               called times
---------------  --------------
quant_stubx                   1
quant_stuby                   1
unused                        0
mul_op                        1
cat_op                        2
quantized_ops.0               1
quantized_ops.1               1
quantized_ops.2               1
quantized_ops.3               1
quantized_ops.4               1
quantized_ops.5               1
quantized_ops.6               1
quantized_ops.7               1
quantized_ops.8               1
dequant_stub                  1
float_ops.0                   1
float_ops.1                   1
float_ops.2                   1
float_ops.3                   1
"""


def test_calls_are_counted_as_documented(capsys) -> None:
    data = torch.rand(2, 3, 12, 13)
    counts = get_module_called_count(Net(), (data, data))
    assert capsys.readouterr().out == CALLED
    assert counts["cat_op"] == 2
    assert counts["unused"] == 0


# The documents' similarity table.
SCALES = {
    "quant_stubx": "0.0115294",
    "quant_stuby": "0.0115294",
    "mul_op": "0.0168156",
    "cat_op": "0.0167490",
    "cat_op(1)": "0.0167490",
    "quantized_ops.0": "0.0167490",
    "quantized_ops.1": "0.0070079",
    "quantized_ops.2.sub": "0.0000041",
    "quantized_ops.2.exp": "0.0000305",
    "quantized_ops.2.sum": "0.0002541",
    "quantized_ops.2.reciprocal": "0.0000037",
    "quantized_ops.2.mul": "0.0009545",
    "quantized_ops.3": "0.0005042",
    "quantized_ops.4": "0.0005042",
    "quantized_ops.5": "0.0005042",
    "quantized_ops.6": "0.0005022",
    "quantized_ops.7": "0.0005022",
    "quantized_ops.8": "0.0005022",
    "dequant_stub": "",
}

NOTE = """\
---------------------------------------------------------------
Note:
* Suffix '(I)' means this layer is Identity in one model
* Suffix '(I vs I)' means this layer is Identity in both models
* Suffix '(i)'(i >= 1) means this op is shared i times
---------------------------------------------------------------
"""


@pytest.fixture
def net_in_two_forms():
    data = (torch.arange(1 * 3 * 4 * 4) / 100 + 1).reshape(1, 3, 4, 4)
    qat_net = prepare_qat_fx(Net(quant=True), {"": default_qat_8bit_fake_quant_qconfig})
    qat_net(data, data)
    return qat_net, convert_fx(qat_net), (data, data)


def test_scales_of_the_similarity_table_are_the_documented_ones(net_in_two_forms, tmp_path) -> None:
    qat_net, quantized, data = net_in_two_forms
    featuremap_similarity(qat_net, quantized, data, out_dir=tmp_path)
    text = (tmp_path / "similarity.txt").read_text()
    assert text.startswith(NOTE)
    rows = rows_of(text)
    assert [(row[1], row[4]) for row in rows] == list(SCALES.items())
    assert [row[0] for row in rows] == [str(i) for i in range(len(rows))]
    # The document's errors are 0 to 2 steps, 5 of a reciprocal.
    assert all(int(row[6]) <= (5 if row[1].endswith("reciprocal") else 2) for row in rows)
    assert all(int(row[7]) <= (5 if row[1].endswith("reciprocal") else 2) for row in rows)
    assert all(float(row[3]) > 0.999 for row in rows)


# Rows that both documents print: names and attributes, in this order.
ATTRIBUTES = [
    *(("quant_stubx", "input"), ("quant_stubx", "output")),
    *(("quant_stuby", "input"), ("quant_stuby", "output")),
    *(("mul_op[mul]", "input-0"), ("mul_op[mul]", "input-1"), ("mul_op[mul]", "output")),
    *(("cat_op[cat]", "input-0-0"), ("cat_op[cat]", "input-0-1"), ("cat_op[cat]", "output")),
    *(("cat_op[cat](1)", "input-0"), ("cat_op[cat](1)", "input-1"), ("cat_op[cat](1)", "output")),
    *(("quantized_ops.0", "input"), ("quantized_ops.0", "output")),
    *(("quantized_ops.1", "input"), ("quantized_ops.1", "output")),
    *(("quantized_ops.2.sub[sub]", a) for a in ("input-0", "input-1", "output")),
    *(("quantized_ops.2.exp", "input"), ("quantized_ops.2.exp", "output")),
    *(("quantized_ops.2.sum[sum]", "input"), ("quantized_ops.2.sum[sum]", "output")),
    *(("quantized_ops.2.reciprocal", "input"), ("quantized_ops.2.reciprocal", "output")),
    *(("quantized_ops.2.mul[mul]", a) for a in ("input-0", "input-1", "output")),
    *((f"quantized_ops.{i}", a) for i in range(3, 9) for a in ("input", "output")),
    *(("dequant_stub", "input"), ("dequant_stub", "output")),
]

QUANTIZED = {
    "quant_stubx": "quantized.quantize.Quantize",
    "mul_op[mul]": "quantized.functional_modules.QFunctional",
    "quantized_ops.0": "quantized.relu.ReLU",
    "quantized_ops.1": "quantized.segment_lut.SegmentLUT",
    "quantized_ops.2.sub[sub]": "quantized.functional_modules.QFunctional",
    "quantized_ops.4": "quantized.interpolate.Interpolate",
    "quantized_ops.6": "quantized.avg_pool2d.AvgPool2d",
    "quantized_ops.7": "quantized.upsampling.Upsample",
    "quantized_ops.8": "quantized.upsampling.UpsamplingBilinear2d",
    "dequant_stub": "quantized.quantize.DeQuantize",
}


def test_statistics_have_the_documented_rows(net_in_two_forms, tmp_path) -> None:
    _, quantized, data = net_in_two_forms
    profile_featuremap(get_raw_features(quantized, data), out_dir=tmp_path)
    first, second = (tmp_path / "statistic.txt").read_text().split("\n\n")
    rows = rows_of(first)
    assert [(row[1], row[3]) for row in rows] == ATTRIBUTES
    types = {row[1]: row[2].removeprefix("<class 'bevquant_hybrid.nn.")[:-2] for row in rows}
    assert [types[name] for name in QUANTIZED] == list(QUANTIZED.values())
    assert (rows[0][9], rows[1][9], rows[-1][9]) == ("torch.float32", "qint8", "torch.float32")
    assert second.startswith("Statistics with quant range in descending order...\n")
    reaches = [max(abs(float(row[4])), abs(float(row[5]))) for row in rows_of(second)]
    assert reaches == sorted(reaches, reverse=True)
    assert sorted(rows_of(second)) == sorted(rows)


class ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)
        self.prelu = nn.PReLU()

    def forward(self, input):
        return torch.nn.functional.selu(self.prelu(self.conv(input)))


class SeluModule(nn.Module):
    def forward(self, input):
        return torch.nn.functional.selu(input)


class HybridModel(nn.Module):
    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.conv0 = nn.Conv2d(channels, channels, 1)
        self.prelu = nn.PReLU()
        self.conv1 = ConvBlock(channels)
        self.conv2 = nn.Conv2d(channels, channels, 1)
        self.conv3 = nn.Conv2d(channels, channels, 1)
        self.conv4 = nn.Conv2d(channels, channels, 1)
        self.selu = SeluModule()
        self.dequant = DeQuantStub()
        self.identity = nn.Identity()
        self.add = FloatFunctional()

    def forward(self, input):
        x = self.identity(self.conv0(self.quant(input)))
        x = torch.nn.functional.selu(self.prelu(x))
        x = self.identity(self.conv3(self.conv2(self.conv1(x))))
        x = self.add.add(x, self.conv4(x))
        return self.dequant(self.selu(x))


HYBRID = {"module_name": ["conv1.conv", "conv3"], "module_type": [SeluModule]}

DEVICES = """\
name                            deploy device    type
------------------------------  ---------------  --------
quant                           CPU              module
conv0                           BPU              module
prelu_input_dequant             CPU              module
prelu                           CPU              module
selu                            CPU              function
conv1.conv                      CPU              module
conv1.prelu                     CPU              module
selu_1                          CPU              function
selu_1_activation_post_process  CPU              module
conv2                           BPU              module
conv3_input_dequant             CPU              module
conv3                           CPU              module
conv3_activation_post_process   CPU              module
add_1                           BPU              method
selu_2_input_dequant            CPU              module
selu_2                          CPU              function
dequant                         CPU              module
"""


def check_devices(qat_model, folder, capsys) -> None:
    for model in (qat_model, convert_fx(qat_model)):
        found = check_deploy_device(model, out_dir=folder)
        assert capsys.readouterr().out == DEVICES
        assert (folder / "deploy_device.txt").read_text() == DEVICES
        assert found == {
            name: (device, kind) for name, device, kind in map(str.split, DEVICES.splitlines()[2:])
        }


def test_devices_of_the_calibrated_example_on_bernoulli2(tmp_path, capsys) -> None:
    set_march(March.BERNOULLI2)
    calibration = prepare_calibration_fx(
        HybridModel(), {"": get_default_calib_qconfig()}, hybrid=True, hybrid_dict=HYBRID
    )
    calibration.eval()(torch.rand(2, 3, 11, 12))
    check_deploy_device(calibration, out_dir=tmp_path)
    assert capsys.readouterr().out == DEVICES
    out = ("conv4", get_default_qat_out_qconfig())
    qconfigs = {"": get_default_qat_qconfig(), "module_name": [out]}
    qat_model = prepare_qat_fx(calibration, qconfigs, hybrid=True, hybrid_dict=HYBRID)
    check_devices(qat_model, tmp_path, capsys)


def test_devices_of_the_example_on_bayes(tmp_path, capsys) -> None:
    out = ("conv4", default_qat_out_8bit_fake_quant_qconfig)
    qconfigs = {"": default_qat_8bit_fake_quant_qconfig, "module_name": [out]}
    qat_model = prepare_qat_fx(HybridModel(), qconfigs, hybrid=True, hybrid_dict=HYBRID)
    qat_model(torch.rand(1, 3, 11, 12))
    check_devices(qat_model, tmp_path, capsys)


def test_the_hybrid_example_compares_in_every_form(tmp_path) -> None:
    torch.manual_seed(3)
    model, data = HybridModel().eval(), torch.rand(2, 3, 5, 6)
    out = ("conv4", default_qat_out_8bit_fake_quant_qconfig)
    qconfigs = {"": default_qat_8bit_fake_quant_qconfig, "module_name": [out]}
    qat_model = prepare_qat_fx(model, qconfigs, hybrid=True, hybrid_dict=HYBRID).eval()
    qat_model(data)
    quantized = convert_fx(qat_model)
    names = [
        *("quant", "conv0", "identity(I vs I)", "prelu", "conv1.conv", "conv1.prelu", "conv2"),
        *("conv3", "identity(I vs I)(1)", "add", "dequant"),
    ]
    for other in (qat_model, quantized):
        rows = featuremap_similarity(model, other, data, out_dir=tmp_path)
        assert [row[1] for row in rows] == names
        assert min(row[3] for row in rows) > 0.999
    rows = featuremap_similarity(qat_model, quantized, data, out_dir=tmp_path)
    boundaries = {row[1] for row in rows} - set(names)
    assert boundaries == {
        *("prelu_input_dequant", "selu_1_activation_post_process", "conv3_input_dequant"),
        *("conv3_activation_post_process", "selu_2_input_dequant"),
    }
    assert max(row[7] for row in rows if row[7] is not None) <= 2
    features = get_raw_features(quantized, data, prefixes=("conv3", "conv3_input"))
    found = {(f["module_name"], f["attr"]): f["dtype"] for f in features}
    assert found["conv3_input_dequant", "input"] == "qint8"
    assert found["conv3", "input"] == found["conv3", "output"] == "torch.float32"
    assert ("conv3_activation_post_process", "output") not in found  # conv3 is a name of its own


@pytest.mark.parametrize("by_hand", [True, False])
def test_preserved_modules_stay_as_the_example_asserts(by_hand: bool) -> None:
    model = FuseNet(3, stubs=True)
    if by_hand:
        model.convmod1.preserve_qat_mode = True
    else:
        set_preserve_qat_mode(model, ("convmod1"), ())  # as the document writes it
    qat_net = prepare_qat_fx(model, {"": default_qat_8bit_fake_quant_qconfig})
    data = torch.rand(2, 3, 5, 5)
    qat_net(data, data)
    quant_model = horizon.quantization.convert_fx(qat_net)
    assert isinstance(quant_model.convmod1.add, horizon_nn.qat.ConvAddReLU2d)
    assert not isinstance(quant_model.convmod2.add, qat.ConvAddReLU2d)
