"""Every kind of layer, compiled: what it returns is what the converted model does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.quantization import DeQuantStub
from torch.utils._pytree import tree_leaves

import bevquant_hybrid as horizon
from bevquant_hybrid import nn as horizon_nn
from bevquant_hybrid.march import March, set_march
from bevquant_hybrid.qtensor import payload
from bevquant_hybrid.quantization import (
    QuantStub,
    compile_model,
    convert,
    convert_fx,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    prepare_qat,
    prepare_qat_fx,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)


class Net(nn.Module):
    """Stubs around what is tested."""

    def __init__(self, body: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.quant, self.other = QuantStub(scale=1 / 64), QuantStub(scale=1 / 32)
        self.dequant, self.parts, self.body = DeQuantStub(), nn.ModuleList(modules), body

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.body(*self.parts, self.quant(x)))


class NetOfTwo(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.dequant(self.body(*self.parts, self.quant(x), self.other(y)))


def one(module: nn.Module) -> Callable[[], Net]:
    return of(lambda part, x: part(x), module)


def of(body: Callable[..., Any], *modules: nn.Module) -> Callable[[], Net]:
    return lambda: Net(body, *copy.deepcopy(modules))


def of_two(body: Callable[..., Any], *modules: nn.Module) -> Callable[[], Net]:
    return lambda: NetOfTwo(body, *copy.deepcopy(modules))


def conv(inputs: int = 4, outputs: int = 4, size: int = 1, **settings: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, **settings)


def f() -> nn.Module:
    return horizon_nn.quantized.FloatFunctional()


def attention(**settings: Any) -> Callable[..., Any]:
    return lambda part, x: part(x, x, x, **settings)[0]


def padded(x: Tensor) -> Tensor:
    return F.pad(F.pad(x, (1, 2, 0, 1), value=-0.5), (1, 1, 1, 1), "replicate")


def pooled(pool: nn.Module, x: Tensor) -> Tensor:
    return pool(x.contiguous(memory_format=torch.channels_last))


def viewed(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x.permute(0, 2, 3, 1).flatten(1)[:, 2:-2]).reshape(2, -1, 4)


def moved(x: Tensor) -> tuple[Tensor, ...]:
    return (
        *x.split(2, 1), *x.chunk(2, 1), *x.unbind(1), x.flip(1), x.roll(1, 2), x.mT,
        x.expand(3, *x.shape), x.repeat(1, 2, 1, 1), x.tile(2), x.unflatten(1, (2, 2)), x[:, 1],
        x.movedim(1, 3), x.select(1, 0), x.index_select(1, torch.tensor([0, 2])), x[..., None],
        x.narrow(1, 1, 2),
        x.gather(1, torch.zeros(2, 3, 6, 6).long()), F.pixel_shuffle(x, 2), x.contiguous(),
        F.pixel_unshuffle(x, 2), torch.channel_shuffle(x, 2), x.squeeze(), x[:],
    )  # fmt: skip


def ordered(x: Tensor) -> tuple[Any, ...]:
    return (
        x.amax(1), x.amin((1, 2)), x.max(), x.min(), tuple(x.max(1)), tuple(x.topk(2, 1)),
        tuple(x.sort(1)), x.argsort(1), x.argmin(1), x.eq(x.flip(1)), x > 0.1, x <= x.flip(2),
        x.argmax(),
    )  # fmt: skip


def pointwise(x: Tensor) -> tuple[Tensor, ...]:
    return x.abs(), x.relu(), x.clamp(-0.5, 0.5), F.relu6(x), F.hardtanh(x), x.clamp(min=0.1)


PICTURE = torch.Size((2, 4, 6, 6))
BOXES = [torch.tensor([[3.0, 5.0, 21.0, 17.0]]), torch.tensor([[1.0, 2.0, 20.0, 9.0]])]
CAUSAL = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
Case = tuple[Callable[[], nn.Module], Any]
NETS: dict[str, Case] = {
    "conv": (one(conv(4, 6, 3, stride=2, padding=1, groups=2)), PICTURE),
    "conv bn relu": (one(nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU())), PICTURE),
    "conv3d": (one(nn.Conv3d(2, 3, 2)), torch.Size((2, 2, 3, 4, 4))),
    "linear": (one(nn.Linear(6, 5, bias=False)), PICTURE),
    "transposed": (one(nn.ConvTranspose2d(4, 3, 2, 2)), PICTURE),
    "batch norm": (one(nn.BatchNorm2d(4)), PICTURE),
    "max pool": (one(nn.MaxPool2d(3, 2, 1)), PICTURE),
    "average pool": (one(nn.AvgPool2d(2, ceil_mode=True)), torch.Size((2, 4, 7, 7))),
    "adaptive pool": (one(nn.AdaptiveAvgPool2d(4)), PICTURE),
    "global pool": (one(nn.AdaptiveAvgPool2d(1)), PICTURE),
    "pixel": (of(pooled, nn.AdaptiveAvgPool2d(1)), PICTURE),
    "permuted norm": (
        of(lambda n, x: n(x.permute(0, 2, 3, 1).contiguous()), nn.LayerNorm(4)), PICTURE
    ),
    "add": (of(lambda c, f, x: f.add(c(x), x), conv(), f()), PICTURE),
    "broadcast sub": (of(lambda p, f, x: f.sub(x, p(x)), nn.AvgPool2d(6), f()), PICTURE),
    "mul": (of(lambda s, f, x: f.mul(x, s(x)), nn.Sigmoid(), f()), PICTURE),
    "cat": (of(lambda c, f, x: f.cat([c(x), x, x], 1), conv(4, 3), f()), PICTURE),
    "mean": (of(lambda f, x: f.mean(x, [2, 3], keepdim=True), f()), PICTURE),
    "sum": (of(lambda f, x: f.sum(x, 1, keepdim=True), f()), PICTURE),
    "matmul": (of(lambda f, x: f.matmul(x, x, y_trans=True), f()), PICTURE),
    "maximum": (of(lambda c, f, x: f.maximum(x, c(x)), conv(), f()), PICTURE),
    "numbers": (of(lambda f, g, x: g.mul_scalar(f.add_scalar(x, -0.3), 1.7), f(), f()), PICTURE),
    "softmax": (one(nn.Softmax(1)), PICTURE),
    "layer norm": (one(nn.LayerNorm([6, 6])), PICTURE),
    "tables": (of(lambda a, b, x: b(a(x)), nn.GELU(), horizon_nn.Exp()), PICTURE),
    "nearest": (of(lambda x: F.interpolate(x, scale_factor=2, mode="nearest")), PICTURE),
    "bilinear": (of(lambda x: F.interpolate(x, (9, 5), mode="bilinear")), PICTURE),
    "pad": (of(padded), PICTURE),
    "views": (of(viewed, nn.Linear(140, 8)), PICTURE),
    "moved": (of(moved), PICTURE),
    "ordered": (of(ordered), PICTURE),
    "pointwise": (of(pointwise), PICTURE),
    "glu": (one(nn.GLU(1)), PICTURE),
    "division": (of_two(lambda part, x, y: part(x, y), horizon_nn.Div()), (PICTURE, PICTURE)),
    "attention": (of(attention(), nn.MultiheadAttention(8, 2)), torch.Size((5, 2, 8))),
    "masked attention": (
        of(attention(attn_mask=CAUSAL), nn.MultiheadAttention(8, 2, batch_first=True)),
        torch.Size((2, 5, 8)),
    ),
    "recurrent": (
        of(lambda part, x: part(x, part(x)), nn.LSTMCell(4, 3)),
        torch.Size((2, 4)),
    ),
    "grid sample": (
        of_two(lambda x, y: F.grid_sample(x, y, align_corners=False)),
        (PICTURE, torch.Size((2, 3, 3, 2))),
    ),
    "boxes": (
        of_two(
            lambda part, x, y: part([x, y], BOXES),
            horizon_nn.MultiScaleRoIAlign((2, 2), [4, 8], 2, 32, 3),
        ),
        (torch.Size((2, 2, 6, 6)), torch.Size((2, 2, 3, 3))),
    ),
    "correlation": (
        of_two(lambda part, x, y: part(x, y), horizon_nn.Correlation(3, 2, 2, 1, 2)),
        (PICTURE, PICTURE),
    ),
    "colours": (of(lambda x: horizon.functional.centered_yuv2rgb(x)), torch.Size((1, 3, 4, 4))),
}  # fmt: skip


def made(net: nn.Module, inputs: Any, flow: str = "eager", dtype: str = "qint8") -> Any:
    """Prepare, observe once and convert."""
    net.qconfig = get_default_qat_qconfig(dtype=dtype)
    if flow == "fx":
        qat = prepare_qat_fx(net)
        qat(*inputs)
        return convert_fx(qat)
    qat = prepare_qat(net)
    qat(*inputs)
    return convert(qat.eval())


def hard_values(sizes: Any) -> list[list[Tensor]]:
    """Random inputs, ones that saturate, ones between two steps, and zeros."""
    shapes = [sizes] if isinstance(sizes, torch.Size) else list(sizes)
    return [
        [torch.randn(shape) for shape in shapes],
        [1e30 * (torch.randint(0, 2, shape) * 2.0 - 1) for shape in shapes],
        [(torch.randint(-200, 200, shape) + 0.5) / 64 for shape in shapes],
        [torch.zeros(shape) for shape in shapes],
    ]


def assert_same(result: Any, expected: Any) -> None:
    mine, models = tree_leaves(result), tree_leaves(expected)
    assert len(mine) == len(models)
    for a, b in zip(mine, models, strict=True):
        assert type(a) is type(b)
        assert payload(a).dtype == payload(b).dtype
        assert torch.equal(payload(a), payload(b))


def loaded(model: Any, inputs: list[Tensor], folder: Any, **settings: Any) -> Any:
    assert compile_model(model, inputs, hbm=folder / "net.hbm", **settings) == 0
    return horizon.runtime.load(folder / "net.hbm")


UNTRACED = ("moved", "ordered")  # neither kind of tracing takes such outputs
UNLISTED = ("moved", "ordered")  # no document lists all of their functions
FLOWS = [(name, flow) for name in NETS for flow in ("eager", "fx")]


@pytest.mark.parametrize(
    ("name", "flow"), [pair for pair in FLOWS if pair[0] not in UNTRACED or pair[1] == "eager"]
)
def test_what_is_compiled_returns_what_was_converted(name: str, flow: str, tmp_path) -> None:
    if name in UNLISTED:
        set_march(March.NASH_E)  # of which nobody says what it lacks
    make, sizes = NETS[name]
    values = hard_values(sizes)
    model = made(make(), values[0], flow)
    compiled = loaded(model, values[0], tmp_path)
    for inputs in values:
        assert_same(compiled(*inputs), model(*inputs))
    if name in UNTRACED or flow == "fx":
        return
    traced = torch.jit.trace(model, tuple(values[0]), check_trace=False)
    compiled = loaded(traced, values[0], tmp_path, opt="fast")
    for inputs in values:
        assert_same(compiled(*inputs), traced(*inputs))


@pytest.mark.parametrize(
    "name", ["conv", "add", "mul", "tables", "cat", "softmax", "numbers", "division"]
)
def test_sixteen_bits(name: str, tmp_path) -> None:
    make, sizes = NETS[name]
    values = hard_values(sizes)
    model = made(make(), values[0], dtype="qint16")
    compiled = loaded(model, values[0], tmp_path)
    for inputs in values:
        assert_same(compiled(*inputs), model(*inputs))


class ConvBNReLU(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())


class ConvAddReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 3, 1), nn.ReLU()
        self.add = torch.nn.quantized.FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.add.add(x, self.conv(x)))


class ConvBNAddReLU(ConvAddReLU):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.add.add(x, self.bn(self.conv(x))))


class NonHybridModel(nn.Module):
    """The documented model that runs on the BPU alone."""

    def __init__(self) -> None:
        super().__init__()
        self.quant = torch.quantization.QuantStub()
        self.layer0 = ConvBNReLU()
        self.layer1, self.layer2 = ConvAddReLU(), ConvBNAddReLU()
        self.conv1, self.dequant = nn.Conv2d(3, 3, 1), DeQuantStub()

    def forward(self, input: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.layer0(self.quant(input))))
        return self.dequant(self.conv1(x))


def test_the_documented_flow_without_a_cpu(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    set_march(March.BAYES)
    data = torch.rand(1, 3, 28, 28)
    calibration = prepare_qat_fx(NonHybridModel(), {"": get_default_calib_qconfig()})
    calibration.eval()
    for _ in range(3):
        calibration(torch.rand(1, 3, 28, 28))
    out = ("conv1", get_default_qat_out_qconfig())
    qat = prepare_qat_fx(calibration, {"": get_default_qat_qconfig(), "module_name": [out]})
    qat(data)
    quantized = convert_fx(qat)
    traced = torch.jit.trace(quantized, data)
    assert compile_model(traced, [data], opt=3, hbm="./model_output/model.hbm") == 0
    compiled = horizon.runtime.load("./model_output/model.hbm")
    for values in (data, torch.randn(1, 3, 28, 28) * 5):
        assert torch.equal(compiled(values), quantized(values))
    calls = [step.operator.partition("::")[2] for step in compiled.program.steps]
    assert calls.count("accumulate") == 2  # additions joined with their convolutions
    assert calls.count("conv") == 4
    assert calls[-1] == "dequantize"
