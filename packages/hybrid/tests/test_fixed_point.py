"""Converted modules against loops over int64 that use nothing of this project."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_hybrid import nn as horizon_nn
from bevquant_hybrid.nn.intrinsic import fused_class
from bevquant_hybrid.nn.qat import qat_form
from bevquant_hybrid.nn.quantized import FloatFunctional, fixed_point_form
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.quantization import get_default_qat_out_qconfig, get_default_qat_qconfig
from bevquant_int8sim import AccumulatorOverflowError

S_IN, S_OTHER, S_OUT = 0.031, 0.0457, 0.0723
RANGES = {"qint8": (-128, 127), "qint16": (-32768, 32767)}


def integers(*shape: int, dtype: str = "qint8", scale: float = S_IN) -> QTensor:
    low, high = RANGES[dtype]
    kind = torch.int8 if dtype == "qint8" else torch.int16
    values = torch.randint(low, high + 1, shape).to(kind)
    return QTensor(values, torch.tensor([scale]), dtype)


def half_up(values: np.ndarray, low: int, high: int) -> np.ndarray:
    return np.clip(np.floor(values + 0.5), low, high).astype(np.int64)


def prepared(module: nn.Module, dtype: str = "qint8", qconfig=None) -> nn.Module:
    made = qat_form(module, qconfig or get_default_qat_qconfig(dtype=dtype))
    if made.activation_post_process is not None:
        made.activation_post_process.set_qparams(S_OUT if dtype == "qint8" else S_OUT / 256)
    return made


def fixed(made: nn.Module, rounding: str = "half_up") -> nn.Module:
    return fixed_point_form(made, "layer", rounding)


def accumulate(x: np.ndarray, w: np.ndarray, conv: nn.Module, transposed: bool) -> np.ndarray:
    """int64 accumulators of a convolution over the last axes, one product after the other."""
    rank = w.ndim - 2
    groups, kernel = conv.groups, w.shape[2:]
    outputs = w.shape[1] * groups if transposed else w.shape[0]
    shape = F.conv_transpose2d if transposed else getattr(F, f"conv{rank}d")
    extra = {"output_padding": conv.output_padding} if transposed else {}
    size = shape(
        torch.zeros(x.shape), torch.zeros(w.shape), None, conv.stride, conv.padding,
        dilation=conv.dilation, groups=groups, **extra,
    ).shape  # fmt: skip
    acc = np.zeros(size, np.int64)
    per_in, per_out = x.shape[1] // groups, outputs // groups
    for place in itertools.product(*map(range, x.shape[2:] if transposed else size[2:])):
        for tap in itertools.product(*map(range, kernel)):
            steps = [
                p * s - pad + t * d
                for p, s, pad, t, d in zip(
                    place, conv.stride, conv.padding, tap, conv.dilation, strict=True
                )
            ]
            inside = size[2:] if transposed else x.shape[2:]
            if not all(0 <= at < n for at, n in zip(steps, inside, strict=True)):
                continue
            source, target = (place, steps) if transposed else (steps, place)
            for g in range(groups):
                ins = slice(g * per_in, (g + 1) * per_in)
                outs = slice(g * per_out, (g + 1) * per_out)
                values = x[(slice(None), ins, *source)]
                taps = w[(ins, slice(None), *tap)].T if transposed else w[(outs, slice(None), *tap)]
                acc[(slice(None), outs, *target)] += values @ taps.T
    return acc


CONVOLUTIONS = [
    (nn.Conv2d(3, 4, 3, padding=1), (2, 3, 6, 5)),
    (nn.Conv2d(4, 6, (3, 2), stride=2, padding=1, dilation=2, groups=2, bias=False), (1, 4, 9, 8)),
    (nn.Conv2d(4, 4, 3, groups=4), (1, 4, 5, 5)),
    (nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2), (1, 4, 3, 4)),
    (nn.ConvTranspose2d(3, 2, 2, 2, bias=False), (2, 3, 3, 3)),
    (nn.Conv3d(2, 3, 2, padding=1), (1, 2, 3, 3, 3)),
]


@pytest.mark.parametrize("activation", [None, nn.ReLU, nn.ReLU6])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("conv", "shape"), CONVOLUTIONS)
@pytest.mark.parametrize(("dtype_in", "dtype_out"), [("qint8", "qint8"), ("qint16", "qint16")])
def test_convolutions(conv, shape, adds: bool, activation, dtype_in: str, dtype_out: str) -> None:
    source = conv
    if adds or activation:
        source = fused_class(type(conv), adds=adds, activation=activation)(
            conv, None, activation() if activation else None
        )
    made = prepared(source, dtype_out)
    layer = fixed(made)
    x = integers(*shape, dtype=dtype_in, scale=S_IN if dtype_in == "qint8" else S_IN / 256)
    transposed = isinstance(conv, nn.ConvTranspose2d)
    weight_scale = made.weight_fake_quant.scale.double().numpy()
    axis = 1 if transposed else 0
    by_channel = [1] * conv.weight.dim()
    by_channel[axis] = -1
    w = np.rint(conv.weight.detach().numpy().astype(np.float64) / weight_scale.reshape(by_channel))
    w = np.clip(w, -128, 127).astype(np.int64)
    assert np.abs(layer.weight.numpy().astype(np.int64) - w).max() <= 1
    w = layer.weight.numpy().astype(np.int64)  # a tie of the fake quantizer may fall either way
    channels = np.tile(weight_scale, conv.groups) if transposed else weight_scale
    channels = channels.reshape(-1, *([1] * (len(shape) - 2)))
    step = float(x.scale.double()) * channels
    acc = accumulate(x.int_repr().numpy().astype(np.int64), w, conv, transposed)
    if conv.bias is not None:
        bias = conv.bias.detach().double().numpy().reshape(channels.shape)
        acc = acc + np.rint(bias / step).astype(np.int64)
    operands = [x]
    if adds:
        other = integers(*acc.shape, scale=S_OTHER)
        operands.append(other)
        acc = acc + np.floor(
            other.int_repr().numpy() * (float(other.scale.double()) / step) + 0.5
        ).astype(np.int64)
    s_out = float(made.activation_post_process.scale.double())
    low, high = RANGES[dtype_out]
    if activation:
        low = 0
    if activation is nn.ReLU6:
        high = min(high, int(np.floor(6 / s_out + 0.5)))
    result = layer(*operands)
    assert result.dtype == dtype_out
    assert np.array_equal(result.int_repr().numpy(), half_up(acc * (step / s_out), low, high))


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7)])
def test_linear_layers(shape) -> None:
    linear = nn.Linear(7, 4)
    made = prepared(linear)
    layer, x = fixed(made), integers(*shape)
    step = float(x.scale.double()) * made.weight_fake_quant.scale.double().numpy()
    acc = x.int_repr().numpy().astype(np.int64) @ layer.weight.numpy().astype(np.int64).T
    acc = acc + np.rint(linear.bias.detach().double().numpy() / step).astype(np.int64)
    expected = half_up(acc * (step / float(layer.scale.double())), -128, 127)
    assert np.array_equal(layer(x).int_repr().numpy(), expected)


@pytest.mark.parametrize("activation", [None, nn.ReLU, nn.ReLU6])
def test_outputs_of_32_bits_are_the_accumulators(activation) -> None:
    conv = nn.Conv2d(3, 4, 1)
    make = fused_class(nn.Conv2d, activation=activation)
    source = make(conv, None, activation()) if activation else conv
    made = prepared(source, qconfig=get_default_qat_out_qconfig())
    layer, x = fixed(made), integers(2, 3, 4, 4)
    result = layer(x)
    assert result.dtype == "qint32"
    exact = F.conv2d(x.dequantize().double(), layer.weight.double()).numpy()
    exact = exact * made.weight_fake_quant.scale.double().numpy().reshape(-1, 1, 1)
    exact = exact + conv.bias.detach().double().numpy().reshape(-1, 1, 1)
    step = (x.scale * made.weight_fake_quant.scale).double().numpy().reshape(-1, 1, 1)
    if activation:
        exact = np.clip(exact, 0, 6 if activation is nn.ReLU6 else None)
    difference = np.abs(result.dequantize().double().numpy() - exact)
    assert (difference <= 0.51 * step + 1e-6).all()  # the bias, rounded to a step
    assert made(x.like(x.dequantize())).dtype == "qint32"


TWO = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "add_relu": lambda a, b: np.maximum(a + b, 0),
}


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("other_shape", [(2, 3, 4), (1, 3, 1)])
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_arithmetic_of_two_is_rounded_once(name: str, other_shape, dtype: str) -> None:
    function = fixed(prepared(FloatFunctional(), dtype))
    x = integers(2, 3, 4, dtype=dtype, scale=S_IN)
    y = integers(*other_shape, scale=S_OTHER)
    a, b = (v.int_repr().numpy().astype(np.int64) for v in (x, y))
    s_x, s_y, s_out = (float(v.double()) for v in (x.scale, y.scale, function.scale))
    if name == "mul":
        exact = (a * b) * (s_x * s_y / s_out)
    else:
        exact = TWO[name](a * (s_x / s_out), b * (s_y / s_out))
    result = getattr(function, name)(x, y).int_repr().numpy()
    assert np.array_equal(result, half_up(exact, *RANGES[dtype]))


def test_sums_means_products_and_concatenations() -> None:
    function = fixed(prepared(FloatFunctional()))
    x, y = integers(2, 3, 4, 4), integers(2, 5, 4, 4, scale=S_OTHER)
    a, b = (v.int_repr().numpy().astype(np.int64) for v in (x, y))
    s_x, s_y, s_out = (float(v.double()) for v in (x.scale, y.scale, function.scale))
    total = a.sum((2, 3), keepdims=True)
    expected = half_up(total * (s_x / s_out), -128, 127)
    assert np.array_equal(function.sum(x, (2, 3), keepdim=True).int_repr().numpy(), expected)
    expected = half_up(total * (s_x / 16 / s_out), -128, 127)
    assert np.array_equal(function.mean(x, (2, 3), keepdim=True).int_repr().numpy(), expected)
    parts = [half_up(v * (s / s_out), -128, 127) for v, s in ((a, s_x), (b, s_y))]
    joined = function.cat([x, y], dim=1).int_repr().numpy()
    assert np.array_equal(joined, np.concatenate(parts, 1))
    left, right = integers(2, 3, 8), integers(2, 5, 8, scale=S_OTHER)
    product = left.int_repr().numpy().astype(np.int64) @ np.swapaxes(
        right.int_repr().numpy().astype(np.int64), 1, 2
    )
    expected = half_up(product * (s_x * s_y / s_out), -128, 127)
    assert np.array_equal(function.matmul(left, right, y_trans=True).int_repr().numpy(), expected)
    larger = function.maximum(x, y[:, :3]).int_repr().numpy()
    assert np.array_equal(larger, np.maximum(parts[0], parts[1][:, :3]))
    shifted = half_up((a * s_x - 0.7) / s_out, -128, 127)
    assert np.array_equal(function.add_scalar(x, -0.7).int_repr().numpy(), shifted)


@pytest.mark.parametrize("count_include_pad", [True, False])
def test_average_pooling(count_include_pad: bool) -> None:
    pool = nn.AvgPool2d(3, 2, 1, count_include_pad=count_include_pad)
    layer, x = fixed(prepared(pool)), integers(1, 2, 7, 6)
    values = x.int_repr().double()
    sums = F.avg_pool2d(values, 3, 2, 1, divisor_override=1).round().numpy()
    inside = F.avg_pool2d(torch.ones_like(values), 3, 2, 1, divisor_override=1).round().numpy()
    count = 9 if count_include_pad else inside
    exact = sums * (float(x.scale.double()) / float(layer.scale.double())) / count
    assert np.array_equal(layer(x).int_repr().numpy(), half_up(exact, -128, 127))


def test_a_batch_norm_is_one_weight_and_one_bias_per_channel() -> None:
    bn = nn.BatchNorm2d(3).eval()
    bn.running_mean.normal_()
    bn.running_var.uniform_(0.5, 2)
    nn.init.normal_(bn.weight)
    made = prepared(bn)
    x = integers(2, 3, 4, 4)
    made.weight_fake_quant.disable_observer()
    made.activation_post_process.disable_observer()
    result, trained = fixed(made)(x), made(x.like(x.dequantize()))
    assert (result.int_repr().int() - trained.int_repr().int()).abs().max() <= 1
    assert torch.allclose(result.dequantize(), bn(x.dequantize()), atol=0.05)


ELEMENTWISE = [
    nn.Sigmoid(), nn.Tanh(), nn.SiLU(), nn.GELU(), nn.LeakyReLU(0.1), nn.ELU(), nn.Hardsigmoid(),
    nn.Softplus(), nn.PReLU(), horizon_nn.Exp(), horizon_nn.Sin(), horizon_nn.Sqrt(),
    horizon_nn.HardLog(), horizon_nn.Reciprocal(), horizon_nn.Pow(2.0), horizon_nn.Floor(),
]  # fmt: skip


@pytest.mark.parametrize("function", ELEMENTWISE, ids=lambda f: type(f).__name__)
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_tables_are_exact_at_every_entry(function, dtype: str) -> None:
    layer = fixed(prepared(function, dtype))
    low, high = RANGES[dtype]
    every = torch.arange(low, high + 1, dtype=torch.int32)
    scale = torch.tensor([S_IN if dtype == "qint8" else S_IN / 256])
    x = QTensor(every.to(torch.int8 if dtype == "qint8" else torch.int16), scale, dtype)
    with torch.no_grad():
        real = function.double()(every.double() * scale.double())
    function.float()
    exact = np.nan_to_num(real.numpy(), nan=0.0, posinf=1e9, neginf=-1e9) / float(
        layer.scale.double()
    )
    assert np.array_equal(layer(x).int_repr().numpy(), half_up(exact, low, high))


def test_layer_norm_is_within_a_step() -> None:
    x, made = integers(2, 6, 5, 4), prepared(nn.LayerNorm([5, 4]))
    made.activation_post_process.set_qparams(S_OUT / 2)
    made.activation_post_process.disable_observer()
    result, trained = fixed(made)(x).int_repr().int(), made(x.like(x.dequantize())).int_repr().int()
    assert (result - trained).abs().max() <= 1


def test_adaptive_pooling_is_the_quantized_mean() -> None:
    layer, x = fixed(prepared(nn.AdaptiveAvgPool2d(1))), integers(2, 3, 5, 7)
    total = x.int_repr().numpy().astype(np.int64).sum((2, 3), keepdims=True)
    exact = total / 35 * float(x.scale.double()) / float(layer.scale.double())
    assert np.array_equal(layer(x).int_repr().numpy(), half_up(exact, -128, 127))


@pytest.mark.parametrize(
    ("rounding", "expected"), [("half_up", [1, 2, -1]), ("half_even", [0, 2, -2])]
)
def test_ties_fall_as_asked(rounding: str, expected: list[int]) -> None:
    made = prepared(FloatFunctional())
    made.activation_post_process.set_qparams(2.0)
    x = QTensor(torch.tensor([1, 3, -3], dtype=torch.int8), torch.ones(1), "qint8")
    zero = x.like(torch.zeros_like(x.int_repr()))
    assert fixed(made, rounding).add(x, zero).int_repr().tolist() == expected


def test_what_a_bpu_does_not_do_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"Conv2d.*must be a quantized tensor.*QuantStub"):
        fixed(prepared(nn.Conv2d(1, 1, 1)))(torch.ones(1, 1, 2, 2))
    with pytest.raises(ValueError, match="divisor_override=3"):
        fixed(prepared(nn.AvgPool2d(2, divisor_override=3)))
    wide = get_default_qat_qconfig(weight_dtype="qint16")
    with pytest.raises(ValueError, match="weights of qint16"):
        fixed(prepared(nn.Conv2d(1, 1, 1), qconfig=wide))
    with pytest.raises(ValueError, match=r"PReLU.*one table holds one slope, got 3"):
        prepared(nn.PReLU(3))


@pytest.mark.parametrize("axis", [0, 1])
def test_integers_of_a_scale_for_each_channel_become_floats(axis: int) -> None:
    values = torch.randint(-128, 128, (3, 3), dtype=torch.int8)
    scale = torch.tensor([0.25, 0.5, 2.0])
    real = torch.ops.bevquant_hybrid.dequantize(values, scale, axis)
    assert torch.equal(real, values * (scale[:, None] if axis == 0 else scale))


def test_one_sum_of_a_product_that_leaves_int32_is_refused() -> None:
    largest = torch.full((1, 3), 32767, dtype=torch.int16)
    other = torch.stack([largest[0], torch.zeros(3, dtype=torch.int16)], 1)
    with pytest.raises(AccumulatorOverflowError, match="mm: a sum of the product leaves int32"):
        torch.ops.bevquant_hybrid.matmul(largest, other, "mm")


def test_one_scale_of_a_weight_serves_every_bias() -> None:
    bias = torch.tensor([0.5, -1.0, 3.0])
    steps = torch.ops.bevquant_hybrid.quantize_bias(
        bias, torch.tensor([0.5]), torch.tensor([0.25]), "conv"
    )
    assert steps.tolist() == [4, -8, 24]


def test_positions_without_a_number_are_refused() -> None:
    x, grid = integers(1, 2, 4, 4), torch.zeros(1, 3, 3, 2)
    assert F.grid_sample(x, grid, align_corners=False).dtype == "qint8"
    grid[0, 1, 1] = torch.nan
    with pytest.raises(ValueError, match="NaN, which no integer stands for"):
        F.grid_sample(x, grid, align_corners=False)
