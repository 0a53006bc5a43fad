"""The documented eager flow: stubs, fuse by hand, prepare_qat, train, convert, trace."""

from __future__ import annotations

import copy
import gzip

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.quantization import DeQuantStub

import bevquant_hybrid as horizon
from bevquant_hybrid.nn import qat
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.quantization import QuantStub, set_fake_quantize

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class ConvBNReLU(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, size: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, size), nn.BatchNorm2d(outputs), nn.ReLU())

    def fuse_model(self) -> None:
        torch.quantization.fuse_modules(
            self,
            ["0", "1", "2"],
            inplace=True,
            fuser_func=horizon.quantization.fuse_known_modules,
        )


class Net(nn.Module):
    """The network of the documented digit classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0 = ConvBNReLU(1, 10, 5)
        self.max_pool = nn.MaxPool2d(kernel_size=2)
        self.conv1 = ConvBNReLU(10, 20, 5)
        self.avg_pool = nn.AvgPool2d(kernel_size=8)
        self.classifier = nn.Sequential(nn.Conv2d(20, 10, 1))
        self.quant = QuantStub(scale=1 / 128)
        self.dequant = DeQuantStub()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1(self.max_pool(self.conv0(self.quant(x))))
        return self.dequant(self.classifier(self.avg_pool(x)))

    def fuse_model(self) -> None:
        for module in self.modules():
            if type(module) is ConvBNReLU:
                module.fuse_model()


def prepared(model: Net) -> nn.Module:
    model.fuse_model()
    model.qconfig = horizon.quantization.get_default_qat_qconfig()
    model.classifier.qconfig = horizon.quantization.get_default_qat_out_qconfig()
    return horizon.quantization.prepare_qat(model)


def test_a_fused_module_prints_as_documented() -> None:
    model = ConvBNReLU(1, 1, 1)
    model.fuse_model()
    assert repr(model).splitlines() == [
        "ConvBNReLU(",
        "  (0): ConvReLU2d(",
        "    (0): Conv2d(1, 1, kernel_size=(1, 1), stride=(1, 1))",
        "    (1): ReLU()",
        "  )",
        "  (1): Identity()",
        "  (2): Identity()",
        ")",
    ]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()], (2, 3, 5, 5)),
        (lambda: [nn.Conv2d(4, 4, 3, groups=2, bias=False), nn.BatchNorm2d(4)], (2, 4, 5, 5)),
        (lambda: [nn.ConvTranspose2d(3, 4, 2, 2), nn.BatchNorm2d(4), nn.ReLU6()], (2, 3, 5, 5)),
        (lambda: [nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3)], (2, 2, 4, 4, 4)),
        (lambda: [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU()], (7, 5)),
    ],
)
def test_fused_layers_compute_what_they_did_in_evaluation(make, shape, training: bool) -> None:
    layers = make()
    layers[1].running_mean.normal_()
    layers[1].running_var.uniform_(0.5, 2)
    nn.init.normal_(layers[1].weight)
    model = nn.Sequential(*layers)
    x = torch.randn(shape)
    expected = copy.deepcopy(model).eval()(x)
    names = [str(i) for i in range(len(layers))]
    fused = horizon.quantization.fuse_modules(model.train(training), names)
    torch.testing.assert_close(fused(x), expected, rtol=1e-4, atol=1e-5)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fused.modules())


class Residual(nn.Module):
    """conv, bn, add, act, where the addition's first argument comes from the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.conv = nn.Conv2d(3, 3, 1)
        self.bn = nn.BatchNorm2d(3)
        self.add = nn.quantized.FloatFunctional()
        self.act = nn.ReLU()
        self.out_conv = nn.Conv2d(3, 3, 3)
        self.dequant = DeQuantStub()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.quant(x)
        z = self.bn(self.conv(y))
        return self.dequant(self.out_conv(self.act(self.add.add(z, y))))


def test_an_addition_is_fused_into_the_convolution() -> None:
    model = Residual().eval()
    model.bn.running_mean.normal_()
    x = torch.randn(2, 3, 6, 6)
    expected = model(x)
    fused = torch.quantization.fuse_modules(
        model, ["conv", "bn", "add", "act"], fuser_func=horizon.quantization.fuse_known_modules
    )
    assert [type(m).__name__ for m in (fused.conv, fused.bn, fused.add, fused.act)] == [
        "Identity",
        "Identity",
        "ConvAddReLU2d",
        "Identity",
    ]
    torch.testing.assert_close(fused(x), expected)
    fused.qconfig = horizon.quantization.get_default_qat_qconfig()
    fused.out_conv.qconfig = horizon.quantization.get_default_qat_out_qconfig()
    trained = horizon.quantization.prepare_qat(fused)
    assert type(trained.add) is qat.ConvAddReLU2d
    assert not any(isinstance(m, nn.ReLU | nn.BatchNorm2d) for m in trained.add.modules())
    trained(x)
    set_fake_quantize(trained, "validation")
    step = trained.add.activation_post_process.scale.item()
    difference = (trained(x) - horizon.quantization.convert(trained)(x)).abs().max()
    gain = trained.out_conv.weight.abs().sum((1, 2, 3)).max().item()
    assert difference <= 1.01 * step * gain


def test_children_decide_for_themselves_and_none_stays_float() -> None:
    model = Residual()
    model.qconfig = horizon.quantization.get_default_qat_qconfig()
    model.conv.qconfig = horizon.quantization.get_default_qat_qconfig(dtype="qint16")
    model.out_conv.qconfig = None
    made = horizon.quantization.prepare_qat(model)
    assert made.conv.activation_post_process.dtype == "qint16"
    assert made.add.activation_post_process.dtype == "qint8"
    assert type(made.out_conv) is nn.Conv2d
    assert type(model.conv) is nn.Conv2d
    with pytest.raises(NotImplementedError, match="conv2d cannot take a QTensor"):
        made(torch.randn(1, 3, 4, 4))


def test_a_float_input_names_the_module_and_the_remedy() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 1)))
    model.qconfig = horizon.quantization.get_default_qat_qconfig()
    with pytest.raises(TypeError, match=r"0\.0 \(Conv2d\): its input is a float.*QuantStub"):
        horizon.quantization.prepare_qat(model)(torch.ones(1, 1, 2, 2))


def test_hybrid_lets_float_and_quantized_meet() -> None:
    layers = nn.Conv2d(1, 2, 1), nn.Sequential(nn.PReLU()), nn.Conv2d(2, 1, 1)
    model = nn.Sequential(QuantStub(), *layers)
    model.qconfig = horizon.quantization.get_default_qat_qconfig()
    model[2].qconfig = None
    made = horizon.quantization.prepare_qat(model, hybrid=True)
    assert isinstance(made(torch.randn(1, 1, 3, 3)), QTensor)


def test_a_failure_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(QuantStub(), nn.Conv2d(1, 1, 3, padding_mode="reflect", padding=1))
    model.qconfig = horizon.quantization.get_default_qat_qconfig()
    with pytest.raises(ValueError, match=r"1 .*reflect.*pads with zeros"):
        horizon.quantization.prepare_qat(model, inplace=True)
    assert type(model[0]) is QuantStub


def test_preparing_twice_is_refused() -> None:
    model = prepared(Net())
    with pytest.raises(ValueError, match="prepared already"):
        horizon.quantization.prepare_qat(model)


def test_calibrated_scales_start_the_training() -> None:
    model = Residual().eval()
    model.qconfig = horizon.quantization.get_default_calib_qconfig()
    calibrated = horizon.quantization.prepare_calibration(model)
    x = torch.rand(4, 3, 30, 30)
    torch.testing.assert_close(calibrated(x), model(x))
    calibrated.qconfig = horizon.quantization.get_default_qat_qconfig()
    trained = horizon.quantization.prepare_qat(calibrated)
    assert trained.quant.activation_post_process.scale.item() == pytest.approx(1 / 127.5, rel=2e-3)
    assert type(trained.conv) is qat.Conv2d


def test_a_forgotten_calibration_is_warned_of() -> None:
    model = Residual()
    model.qconfig = horizon.quantization.get_default_qat_qconfig()
    made = horizon.quantization.prepare_qat(model)
    made.conv = made.bn = made.add = made.out_conv = nn.Identity()
    with pytest.warns(UserWarning, match="`quant` has not collected any statistics of activations"):
        horizon.quantization.convert(made)


def test_a_module_under_two_names_stays_one() -> None:
    model = nn.Module()
    model.first = model.second = nn.Conv2d(1, 1, 1)
    model.qconfig = horizon.quantization.get_default_qat_qconfig()
    made = horizon.quantization.prepare_qat(model)
    assert made.first is made.second
    assert type(made.first) is qat.Conv2d


def test_observer_params_are_copied_by_name() -> None:
    source, target = prepared(Net()), prepared(Net())
    source(torch.rand(2, 1, 28, 28))
    horizon.quantization.load_observer_params(source, target)
    mine = source.conv1[0].activation_post_process
    copied = target.conv1[0].activation_post_process
    assert torch.equal(mine.scale, copied.scale)
    assert torch.equal(mine.activation_post_process.max_val, copied.activation_post_process.max_val)


@pytest.fixture(scope="module")
def digits(real_data):
    folder = real_data / "mnist_t10k"
    if not folder.is_dir():
        pytest.skip(f"no digits in {folder}")
    images = gzip.open(folder / "t10k-images-idx3-ubyte.gz").read()[16:]
    labels = gzip.open(folder / "t10k-labels-idx1-ubyte.gz").read()[8:]
    x = torch.tensor(np.frombuffer(images, np.uint8).reshape(-1, 1, 28, 28).copy())
    return (x.float() / 127.5 - 1), torch.tensor(np.frombuffer(labels, np.uint8).copy()).long()


def test_real_digits_from_float_to_a_traced_integer_model(digits) -> None:
    images, labels = digits
    model = Net()

    def train(module: nn.Module, rate: float, batches: int, start: int) -> None:
        optimizer = torch.optim.Adam(module.parameters(), rate)
        for i in range(batches):
            part = slice(start + 64 * i, start + 64 * (i + 1))
            loss = F.cross_entropy(module(images[part]).view(-1, 10), labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def accuracy(module: nn.Module) -> float:
        with torch.no_grad():
            right = module(images[9000:]).view(-1, 10).argmax(1) == labels[9000:]
        return right.float().mean().item()

    train(model, 2e-2, 60, 0)
    start = accuracy(model.eval())
    trained = prepared(model)
    before = trained.conv0[0].weight.clone()
    train(trained, 1e-3, 10, 4000)
    assert not torch.equal(trained.conv0[0].weight, before)
    set_fake_quantize(trained, "validation")
    converted = horizon.quantization.convert(trained.eval())
    traced = torch.jit.trace(converted, images[:1])
    assert torch.equal(traced(images[:32]), converted(images[:32]))
    assert start > 0.5  # ten classes; more takes longer than a test may
    assert accuracy(trained) > start - 0.02
    assert abs(accuracy(converted) - accuracy(trained)) < 0.01


class Swish(nn.Module):
    """A module of a user's own, which this package knows nothing of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


class QATSwish(nn.Module):
    def __init__(self, qconfig) -> None:
        super().__init__()
        self.activation_post_process = qconfig.activation()

    @classmethod
    def from_float(cls, source: nn.Module) -> QATSwish:
        return cls(source.qconfig)

    def forward(self, x: QTensor) -> QTensor:
        values = x.dequantize()
        return self.activation_post_process(values * torch.sigmoid(values))


class FixedSwish(nn.Module):
    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    @classmethod
    def from_float(cls, source: QATSwish) -> FixedSwish:
        return cls(source.activation_post_process.scale.clone())

    def forward(self, x: QTensor) -> QTensor:
        values = x.dequantize()
        steps = (values * torch.sigmoid(values) / self.scale).round().clamp(-128, 127)
        return QTensor(steps.to(torch.int8), self.scale, "qint8")


def test_modules_of_ones_own_take_part_by_mapping() -> None:
    model = nn.Sequential(QuantStub(), nn.Conv2d(2, 3, 1), Swish(), nn.Conv2d(3, 2, 1))
    model.append(DeQuantStub())
    model.qconfig = horizon.quantization.get_default_qat_qconfig()
    made = horizon.quantization.prepare_qat(model, mapping={Swish: QATSwish})
    assert type(made[2]) is QATSwish
    assert type(model[2]) is Swish
    assert "qconfig" not in model[2].__dict__
    x = torch.randn(2, 2, 4, 4)
    made(x)
    set_fake_quantize(made, "validation")
    assert (made(x) - model(x)).norm() < 0.05 * model(x).norm()
    converted = horizon.quantization.convert(made, mapping={QATSwish: FixedSwish})
    assert type(converted[2]) is FixedSwish
    step = made[3].activation_post_process.scale.item()
    gain = made[3].weight.abs().sum((1, 2, 3)).max() * made[2].activation_post_process.scale.item()
    assert (converted(x) - made(x)).abs().max() <= 1.01 * (step + gain)


@pytest.mark.parametrize("traced", [True, False])
def test_a_model_in_two_parts_hands_integers_over(traced: bool) -> None:
    """The documented split: a stub in the middle records the scale of what it is given."""

    class TwoParts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.middle = QuantStub(), QuantStub(scale=None)
            self.first, self.second = nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 3)
            self.dequant = DeQuantStub()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dequant(self.second(self.middle(self.first(self.quant(x)))))

    model = TwoParts()
    qconfig = horizon.quantization.get_default_qat_qconfig()
    model.qconfig = qconfig
    prepare = horizon.quantization.prepare_qat_fx if traced else horizon.quantization.prepare_qat
    made = prepare(model)
    x = torch.randn(1, 2, 6, 6)
    made(x)
    set_fake_quantize(made, "validation")
    made(x)
    scale = made.first.activation_post_process.scale
    assert torch.equal(made.middle.activation_post_process.scale, scale)
    converted = horizon.quantization.convert(made)
    # On the chip the second part is given the first one's integers; traced, floats of that scale.
    handed = converted.first(converted.quant(x))
    second = converted.second(converted.middle(handed.dequantize()))
    assert torch.equal(converted.middle(handed.dequantize()).int_repr(), handed.int_repr())
    assert torch.equal(second.dequantize(), converted(x))
