"""Division, gates, softmax, layer norm and tables against references in whole numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from bevquant_hybrid import nn as horizon_nn
from bevquant_hybrid.nn.qat import qat_form
from bevquant_hybrid.nn.quantized import fixed_point_form
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    get_default_calib_qconfig,
    get_default_qat_qconfig,
    prepare_calibration_fx,
    prepare_qat_fx,
)

RANGES = {"qint8": (-128, 127), "qint16": (-32768, 32767)}
STORAGE = {"qint8": torch.int8, "qint16": torch.int16}


def integers(*shape: int, dtype: str = "qint8", scale: float = 0.031) -> QTensor:
    low, high = RANGES[dtype]
    values = torch.randint(low, high + 1, shape).to(STORAGE[dtype])
    return QTensor(values, torch.tensor([scale]), dtype)


def both_forms(module: nn.Module, dtype: str, scale: float) -> tuple[nn.Module, nn.Module]:
    """A QAT module whose output scale is set, and its fixed-point form."""
    made = qat_form(module, get_default_qat_qconfig(dtype=dtype)).eval()
    made.activation_post_process.set_qparams(scale)
    for part in made.modules():
        if hasattr(part, "disable_observer"):
            part.disable_observer()
    return made, fixed_point_form(made, "layer", "half_up")


def as_trained(x: QTensor) -> QTensor:
    return x.like(x.dequantize())


def half_up(value: Fraction, dtype: str) -> int:
    low, high = RANGES[dtype]
    return min(max((2 * value + 1) // 2, low), high)


def exact(scale: torch.Tensor) -> Fraction:
    return Fraction(float(scale.reshape(()).double()))


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_quotients_are_rounded_once(dtype: str) -> None:
    x = integers(3, 4, 5, dtype=dtype, scale=0.031)
    y = integers(1, 4, 1, dtype=dtype, scale=0.0457)
    y.int_repr()[0, 0] = 0
    x.int_repr()[0, 0, 0] = 0
    made, layer = both_forms(horizon_nn.Div(), dtype, 0.0723)
    result = layer(x, y).int_repr()
    factor = exact(x.scale) / (exact(y.scale) * exact(layer.scale))
    high = RANGES[dtype][1]
    for place in np.ndindex(3, 4, 5):
        a, b = int(x.int_repr()[place]), int(y.int_repr()[0, place[1], 0])
        expected = half_up(Fraction(a, b) * factor, dtype) if b else (high if a > 0 else 0)
        if not b and a < 0:
            expected = RANGES[dtype][0]
        assert int(result[place]) == expected
    trained = made(as_trained(x), as_trained(y)).int_repr()
    difference = (trained.int() - result.int()).abs()
    assert difference.max() <= 1


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_gates_are_rounded_once(dtype: str) -> None:
    x = integers(2, 6, 5, dtype=dtype, scale=0.031 if dtype == "qint8" else 0.031 / 256)
    made, layer = both_forms(nn.GLU(1), dtype, 0.03 if dtype == "qint8" else 0.03 / 256)
    values = x.int_repr().numpy().astype(np.float64) * float(x.scale.double())
    a, b = values[:, :3], values[:, 3:]
    expected = np.floor(a / (1 + np.exp(-b)) / float(layer.scale.double()) + 0.5)
    result = layer(x).int_repr().numpy()
    assert (result != np.clip(expected, *RANGES[dtype])).sum() == 0
    assert np.abs(made(as_trained(x)).int_repr().numpy().astype(int) - result).max() <= 1


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("scale", [0.002, 0.031, 0.4])
def test_softmax_is_five_steps_each_rounded_once(dtype: str, scale: float) -> None:
    x = integers(4, 37, 3, scale=scale)
    made = qat_form(nn.Softmax(1), get_default_qat_qconfig(dtype=dtype)).train()
    made(as_trained(x))
    for part in made.eval().modules():
        if hasattr(part, "disable_observer"):
            part.disable_observer()
    layer = convert(nn.Sequential(made))[0]
    steps = {name: exact(part.scale) for name, part in layer.named_children()}
    assert float(steps["exp"]) == pytest.approx(1 / 32767.5)
    q = x.int_repr().numpy().astype(np.int64)

    def rounded(values, factor: Fraction, kind: str = "qint16"):
        return np.vectorize(lambda v: half_up(int(v) * factor, kind))(values)

    def looked_up(function, values, step: Fraction, result: Fraction):
        real = function(values * float(step)) / float(result)
        return np.clip(np.floor(real + 0.5), *RANGES["qint16"]).astype(np.int64)

    below = rounded(q - q.max(1, keepdims=True), exact(x.scale) / steps["sub"])
    exponentials = looked_up(np.exp, below, steps["sub"], steps["exp"])
    total = rounded(exponentials.sum(1, keepdims=True), steps["exp"] / steps["sum"])
    inverse = looked_up(np.reciprocal, total, steps["sum"], steps["reciprocal"])
    factor = steps["exp"] * steps["reciprocal"] / steps["mul"]
    expected = rounded(exponentials * inverse, factor, dtype)
    result = layer(x).int_repr().numpy()
    assert (result != expected).sum() == 0
    trained = made(as_trained(x)).int_repr().numpy()
    assert np.abs(trained.astype(int) - result).max() <= (1 if dtype == "qint8" else 5)
    shares = made(as_trained(x)).dequantize()
    assert (shares - x.dequantize().softmax(1)).abs().max() <= 2 * float(steps["mul"]) + 1e-3


def test_what_a_softmax_excludes_takes_no_part() -> None:
    x = integers(2, 6, scale=0.05)
    excluded = torch.zeros(2, 6, dtype=torch.bool)
    excluded[0, 2:], excluded[1] = True, True
    made = qat_form(nn.Softmax(-1), get_default_qat_qconfig()).train()
    trained = made(as_trained(x), excluded).dequantize()
    layer = convert(nn.Sequential(made.eval()))[0]
    for result in (trained, layer(x, excluded).dequantize()):
        assert not result[excluded].any()
        near = x.dequantize()[0, :2].softmax(0)
        assert (result[0, :2] - near).abs().max() < 0.01


@pytest.mark.parametrize("shape", [(5,), (4, 5), (3, 4, 5), (2, 3, 4, 5)])
@pytest.mark.filterwarnings("ignore:Implicit dimension choice for softmax")
def test_a_softmax_without_an_axis_takes_torchs(shape) -> None:
    x = integers(*shape, scale=0.02)
    made = qat_form(nn.Softmax(), get_default_qat_qconfig()).train()
    near = nn.Softmax()(x.dequantize())
    assert (made(as_trained(x)).dequantize() - near).abs().max() < 0.01
    assert (convert(nn.Sequential(made.eval()))[0](x).dequantize() - near).abs().max() < 0.01


def test_calibration_sets_the_steps_of_a_softmax() -> None:
    x = torch.linspace(-2, 2, 2000).reshape(2, 10, 100)
    model = nn.Sequential(QuantStub(), nn.Softmax(1), DeQuantStub())
    calibrated = prepare_calibration_fx(model, {"": get_default_calib_qconfig()}).eval()
    torch.testing.assert_close(calibrated(x), model(x))
    qat = prepare_qat_fx(calibrated, {"": get_default_qat_qconfig()})
    softmax = qat.get_submodule("1")
    kinds = {name: part.activation_post_process.dtype for name, part in softmax.named_children()}
    assert kinds == dict.fromkeys(("sub", "exp", "sum", "reciprocal"), "qint16") | {"mul": "qint8"}
    assert (qat.eval()(x) - model(x)).abs().max() < 0.01
    assert type(softmax.to_float()) is nn.Softmax


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize(
    ("layer_norm", "shape", "axes"),
    [
        (nn.LayerNorm([4, 3]), (2, 5, 4, 3), (2, 3)),
        (nn.LayerNorm(7, elementwise_affine=False), (3, 7), (1,)),
        (horizon_nn.LayerNorm([6, 1, 1], dim=1), (2, 6, 3, 4), (1,)),
        (horizon_nn.LayerNorm([6, 3, 4], dim=(1, 2, 3)), (2, 6, 3, 4), (1, 2, 3)),
    ],
)
def test_layer_norm_of_exact_sums(dtype: str, layer_norm, shape, axes) -> None:
    for parameter in layer_norm.parameters():
        nn.init.normal_(parameter)
    x = integers(*shape, scale=0.011)
    made, layer = both_forms(layer_norm, dtype, 0.02 if dtype == "qint8" else 0.02 / 256)
    q = x.int_repr().numpy().astype(np.int64)
    count = int(np.prod([shape[a] for a in axes]))
    deviation = count * q - q.sum(axes, keepdims=True)  # n·(q − mean), a whole number
    squares = (deviation**2).sum(axes, keepdims=True)  # n³·variance
    step = float(x.scale.double())
    spread = np.sqrt(squares / count**3 * step**2 + layer_norm.eps)
    real = deviation / count * step / spread
    if layer_norm.weight is not None:
        real = real * layer_norm.weight.detach().double().numpy()
        real = real + layer_norm.bias.detach().double().numpy()
    expected = np.clip(np.floor(real / float(layer.scale.double()) + 0.5), *RANGES[dtype])
    result = layer(x).int_repr().numpy()
    assert (result != expected).sum() == 0
    trained = made(as_trained(x)).int_repr().numpy().astype(int)
    assert np.abs(trained - result).max() <= (1 if dtype == "qint8" else 2)
    assert torch.allclose(
        layer(x).dequantize(), layer_norm(x.dequantize()).clamp(*limits(layer, dtype)), atol=0.02
    )


def limits(layer: nn.Module, dtype: str) -> tuple[float, float]:
    low, high = RANGES[dtype]
    return low * layer.scale.item(), high * layer.scale.item()


def test_a_layer_norm_over_the_channels_is_torchs_with_the_channels_last() -> None:
    x = torch.randn(2, 6, 3, 4)
    mine, theirs = horizon_nn.LayerNorm([6, 1, 1], dim=1), nn.LayerNorm(6)
    nn.init.normal_(mine.weight)
    with torch.no_grad():
        theirs.weight.copy_(mine.weight.flatten())
    moved = theirs(x.movedim(1, -1)).movedim(-1, 1)
    torch.testing.assert_close(mine(x), moved, rtol=1e-4, atol=1e-5)
    plain = horizon_nn.LayerNorm([3, 4])
    torch.testing.assert_close(plain(x), nn.LayerNorm([3, 4])(x))


@pytest.mark.parametrize("make", [nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batch_norms_of_volumes_are_one_weight_and_one_bias_per_channel(make) -> None:
    bn = make(3).eval()
    bn.running_mean.normal_()
    bn.running_var.uniform_(0.5, 2)
    made, layer = both_forms(bn, "qint8", 0.06)
    x = integers(2, 3, 4, 2, 3)
    weight = made.weight_fake_quant.scale.double().numpy()
    factor = (bn.weight / (bn.running_var + bn.eps).sqrt()).detach().double().numpy()
    offset = bn.bias.detach().double().numpy() - bn.running_mean.double().numpy() * factor
    w = np.clip(np.rint(factor / weight), -128, 127).astype(np.int64)
    step = float(x.scale.double()) * weight
    bias = np.rint(offset / step).astype(np.int64)
    by_channel = (1, 3, 1, 1, 1)
    acc = x.int_repr().numpy().astype(np.int64) * w.reshape(by_channel) + bias.reshape(by_channel)
    real = acc * (step / float(layer.scale.double())).reshape(by_channel)
    expected = np.clip(np.floor(real + 0.5), -128, 127)
    assert (layer(x).int_repr().numpy() != expected).sum() == 0
    trained = made(as_trained(x)).int_repr()
    assert (trained.int() - layer(x).int_repr().int()).abs().max() <= 1


ELEMENTWISE = [
    *(nn.Sigmoid(), nn.Tanh(), nn.SiLU(), nn.GELU(), nn.LeakyReLU(0.1), nn.ELU(), nn.Softplus()),
    *(nn.Hardsigmoid(), nn.Hardswish(), nn.PReLU(), nn.Mish(), nn.CELU(), nn.LogSigmoid()),
    *(getattr(horizon_nn, name)() for name in ("Exp", "Sin", "Cos", "Atan", "Asinh", "Erf")),
    *(horizon_nn.Pow(2.0), horizon_nn.Selu(), horizon_nn.Ceil(), horizon_nn.Floor()),
]


@pytest.mark.parametrize("function", ELEMENTWISE, ids=lambda f: type(f).__name__)
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_tables_are_within_a_step_of_training_at_every_integer(function, dtype: str) -> None:
    low, high = RANGES[dtype]
    # Inputs within ±3, outputs at the scale of their own range.
    scale = torch.tensor([3.0 / (high + 0.5)])
    every = torch.arange(low, high + 1).to(STORAGE[dtype])
    x = QTensor(every, scale, dtype)
    with torch.no_grad():
        top = function(x.dequantize()).abs().max().item()
    made, layer = both_forms(function, dtype, top / (high + 0.5))
    difference = (made(as_trained(x)).int_repr().int() - layer(x).int_repr().int()).abs()
    assert difference.max() <= 1
