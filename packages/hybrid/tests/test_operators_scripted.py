"""The calls of a traced model are those of the model that was traced, also behind a file."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_hybrid import quantization
from bevquant_hybrid.nn.quantized import FloatFunctional
from bevquant_hybrid.operators import find_violations, trace_calls

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Between(nn.Module):
    """What is given, between stubs."""

    def __init__(self, *layers):
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.body = nn.Sequential(*layers)

    def forward(self, x):
        return self.dequant(self.body(self.quant(x)))


class Arithmetic(nn.Module):
    """Every method of a FloatFunctional, a call each."""

    def __init__(self):
        super().__init__()
        for name in ("add", "sub", "mul", "cat", "mean", "sum", "max", "mat", "plus", "times"):
            setattr(self, name, FloatFunctional())
        self.twice = FloatFunctional()

    def forward(self, x):
        y = self.times.mul_scalar(self.plus.add_scalar(x, 0.5), 2.0)
        y = self.sub.sub(self.add.add(x, y), self.mul.mul(x, y))
        y = self.max.maximum(self.twice.add_relu(y, x), x)
        y = self.mat.matmul(y, y, y_trans=True)
        total = self.sum.sum(y, 1, keepdim=True)
        return self.cat.cat([total, self.mean.mean(y, 1, keepdim=True)], 1)


class Functions(nn.Module):
    """Functions that quantized tensors take as they are."""

    def forward(self, x):
        x = F.max_pool2d(torch.relu(x), 2)
        x = F.interpolate(x, scale_factor=2.0, mode="nearest", recompute_scale_factor=True)
        x = F.pad(x, (1, 1, 1, 1))
        return torch.abs(x.transpose(1, 2).reshape(1, 10, 4, 10)[:, :8])


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return self.attend(x, x, x)[0]


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(8, 4)

    def forward(self, x):
        return self.cell(x)[0]


class Bounds(nn.Module):
    """Rectifiers and clamps as functions: operations alike, rows of their own."""

    def __init__(self, six):
        super().__init__()
        self.six = six

    def forward(self, x):
        return F.relu6(x) if self.six else torch.clamp(x, 0, 0.5)


class Sampled(nn.Module):
    def forward(self, x):
        grid = torch.linspace(-1, 1, 50).reshape(1, 5, 5, 2)
        return F.grid_sample(x, grid, "nearest", "border", align_corners=False)


def traced(model, x):
    """The fixed-point model, traced, and read from the file that tracing wrote."""
    model.qconfig = quantization.get_default_qat_qconfig()
    qat = quantization.prepare_qat(model)
    qat(x)
    fixed = quantization.convert(qat.eval())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fixed, torch.jit.trace(fixed, x)


def seen(calls):
    """What limits and estimates ask of calls, without those that pass their input on."""
    passing, kept = {}, []
    for call in calls:
        sources = tuple(dict.fromkeys(passing.get(path, path) for path in call.inputs))
        if call.operator.endswith((".Identity", ".Dropout")):
            passing[call.path] = sources[0]
            continue
        kept.append(
            (call.path, call.operator, call.input_shapes, call.input_dtypes,
             call.output_shape, call.output_dtype, call.is_model_output, call.weight_count,
             call.bias_count, sources)
        )  # fmt: skip
    return kept


MODELS = {
    "arithmetic": (Arithmetic(), (1, 3, 8, 8)),
    "functions": (Functions(), (1, 4, 8, 8)),
    "attention": (Attends(), (5, 3, 8)),
    "cell": (Cell(), (3, 8)),
    "relu6": (Bounds(True), (1, 4, 8, 8)),
    "clamps": (Bounds(False), (1, 4, 8, 8)),
    "sampling": (Sampled(), (1, 4, 8, 8)),
    "convolution": (nn.Conv2d(4, 8, 3, 2, 1, groups=2, bias=False), (1, 4, 8, 8)),
    "transposed": (nn.ConvTranspose2d(4, 6, 4, 2, 1), (1, 4, 8, 8)),
    "volume": (nn.Conv3d(2, 3, 3, padding=1), (1, 2, 4, 4, 4)),
    "linear": (nn.Linear(8, 3), (1, 2, 8, 8)),
    "batch norm": (nn.BatchNorm2d(4), (1, 4, 8, 8)),
    "layer norm": (nn.LayerNorm((8, 8)), (1, 4, 8, 8)),
    "softmax": (nn.Softmax(1), (1, 4, 8, 8)),
    "tables": (nn.Sequential(nn.Sigmoid(), nn.GELU(), nn.SiLU(), nn.Tanh()), (1, 4, 8, 8)),
    "pools": (nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)),
              (1, 4, 16, 16)),
    "rectifiers": (nn.Sequential(nn.ReLU(), nn.ReLU6()), (1, 4, 8, 8)),
    "moves": (nn.Sequential(nn.PixelShuffle(2), nn.ZeroPad2d(1), nn.Flatten()), (1, 4, 8, 8)),
    "upsampling": (nn.UpsamplingBilinear2d(scale_factor=2), (1, 4, 8, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_traced_model_has_the_calls_of_the_model(name, tmp_path):
    body, shape = MODELS[name]
    x = torch.rand(shape)
    fixed, script = traced(Between(body), x)
    torch.jit.save(script, str(tmp_path / "model.pt"))
    expected = trace_calls(fixed, x)
    assert len(expected) > 2
    for form in (script, torch.jit.load(str(tmp_path / "model.pt"))):
        calls = trace_calls(form, x)
        assert seen(calls) == seen(expected)
        for march in ("bernoulli2", "bayes"):
            assert find_violations(calls, march) == find_violations(expected, march)


def test_a_method_of_a_fused_addition_is_one_call():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.shortcut = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
            self.add, self.act = FloatFunctional(), nn.ReLU()

        def forward(self, x):
            return self.act(self.add.add(self.conv(x), self.shortcut(x)))

    body = Residual()
    quantization.fuse_modules(body, ["conv", "add", "act"], inplace=True)
    x = torch.rand(1, 4, 8, 8)
    _, script = traced(Between(body), x)
    calls = trace_calls(script, x)
    assert [call.path for call in calls] == ["quant", "body.0.shortcut", "body.0.add", "dequant"]
    add = calls[2]
    assert (add.operator, add.attributes["sumin"]) == ("torch.nn.Conv2d", True)
    assert sorted(add.inputs) == ["body.0.shortcut", "quant"]
    assert (add.weight_count, add.bias_count) == (4 * 4 * 9, 4)


def test_settings_of_a_traced_model_come_from_its_operations():
    layers = nn.Conv2d(4, 8, (3, 5), (2, 1), (1, 2), groups=2), nn.AvgPool2d(2, 1)
    _, script = traced(Between(*layers), torch.rand(1, 4, 8, 8))
    _, conv, pool, _ = trace_calls(script, torch.rand(3, 4, 16, 16))
    wanted = {"in_channels": 4, "out_channels": 8, "kernel_size": (3, 5), "stride": (2, 1),
              "padding": (1, 2), "dilation": (1, 1), "groups": 2,
              "weight_dtype": "qint8"}  # fmt: skip
    assert {name: conv.attributes[name] for name in wanted} == wanted
    assert pool.attributes["kernel_size"] == (2, 2)
    assert pool.attributes["stride"] == (1, 1)
    assert pool.input_shapes == ((3, 8, 8, 16),)  # of these inputs, not of those it was traced on


def test_a_scripted_model_is_told_to_be_traced():
    class Choice(nn.Module):
        def forward(self, x):
            if x.shape[0] > 1:
                x = x + 1
            return x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(Choice())
    with pytest.raises(ValueError, match=r"the model holds a .*torch\.jit\.trace"):
        trace_calls(script, torch.rand(2, 3))


def test_what_fails_in_a_traced_model_is_named():
    _, script = traced(Between(nn.Conv2d(4, 8, 3)), torch.rand(1, 4, 8, 8))
    with pytest.raises(RuntimeError, match=r"body\.0 does not run on the example inputs"):
        trace_calls(script, torch.rand(1, 3, 8, 8))
    with pytest.raises(RuntimeError, match="the model takes 1 inputs, got 2"):
        trace_calls(script, (torch.rand(1, 4, 8, 8), torch.rand(1)))
