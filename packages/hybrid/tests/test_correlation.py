"""Correlation of feature maps, against four plain loops."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from bevquant_hybrid.nn import Correlation, qat, quantized
from bevquant_hybrid.nn.qat import qat_form
from bevquant_hybrid.nn.quantized import fixed_point_form
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.quantization import get_default_qat_qconfig
from bevquant_int8sim import AccumulatorOverflowError

QAT = get_default_qat_qconfig()


def correlated(x: np.ndarray, y: np.ndarray, layer: Correlation) -> np.ndarray:
    """Sums of products, place by place, displacement by displacement, in the type of `x`."""
    kernel, reach = layer.kernel_size, layer.max_displacement
    sides = ((0, 0), (0, 0), (layer.pad_size,) * 2, (layer.pad_size,) * 2)
    x, y = np.pad(x, sides), np.pad(y, sides)
    border = reach + (kernel - 1) // 2
    rows, columns = (math.ceil((n - 2 * border) / layer.stride1) for n in x.shape[2:])
    radius = reach // layer.stride2
    found = np.zeros((len(x), (2 * radius + 1) ** 2, rows, columns), x.dtype)
    for q, i, j in np.ndindex(found.shape[1:]):
        dy = (q // (2 * radius + 1) - radius) * layer.stride2
        dx = (q % (2 * radius + 1) - radius) * layer.stride2
        top, left = i * layer.stride1 + reach, j * layer.stride1 + reach
        first = x[:, :, top : top + kernel, left : left + kernel]
        second = y[:, :, top + dy : top + dy + kernel, left + dx : left + dx + kernel]
        assert first.shape == second.shape
        found[:, q, i, j] = (first * second).sum((1, 2, 3))
    return found


def settings(draw: random.Random) -> tuple[Correlation, tuple[int, ...]]:
    """A layer and the smallest maps that it takes, or somewhat larger ones."""
    kernel, reach = draw.choice([1, 1, 3, 5]), draw.randint(0, 4)
    steps = draw.randint(1, 3), draw.randint(1, 3)
    pad = draw.randint(0, reach + 2)
    least = max(1, 2 * (reach + kernel // 2) + 1 - 2 * pad)
    sizes = (least + draw.randint(0, 5), least + draw.randint(0, 5))
    layer = Correlation(kernel, reach, *steps, pad)
    return layer, (draw.randint(1, 2), draw.randint(1, 5), *sizes)


@pytest.mark.parametrize("seed", range(12))
def test_floats_and_integers_are_those_of_the_loops(seed: int) -> None:
    draw = random.Random(seed)
    layer, shape = settings(draw)
    x, y = (torch.randn(shape, dtype=torch.double) for _ in range(2))
    size = layer.kernel_size**2 * shape[1]
    expected = correlated(x.numpy(), y.numpy(), layer) / size
    assert np.allclose(layer(x, y).numpy(), expected, rtol=0, atol=1e-12)

    scales = 0.011, 0.043
    maps = [
        QTensor(torch.randint(-128, 128, shape, dtype=torch.int8), torch.tensor([s]), "qint8")
        for s in scales
    ]
    made = qat_form(layer, QAT)
    assert isinstance(made, qat.Correlation)
    made.activation_post_process.set_qparams(draw.choice([0.004, 0.03]))
    made.activation_post_process.disable_observer()
    for rounding in ("half_up", "half_even"):
        converted = fixed_point_form(made, "correlation", rounding)
        assert isinstance(converted, quantized.Correlation)
        acc = correlated(*(m.int_repr().numpy().astype(np.int64) for m in maps), layer)
        factor = float(maps[0].scale.double() * maps[1].scale.double() / size)
        exact = acc * (factor / float(converted.scale.double()))
        rounded = np.floor(exact + 0.5) if rounding == "half_up" else np.rint(exact)
        result = converted(*maps).int_repr().numpy()
        assert int((result != np.clip(rounded, -128, 127)).sum()) == 0
    trained = made(*(m.like(m.dequantize()) for m in maps)).int_repr().int().numpy()
    assert np.abs(trained - result).max() <= 1


def test_sixteen_bits_are_exact_until_they_leave_int32() -> None:
    layer = Correlation(1, 1, 1, 1, 1)
    values = torch.randint(-(2**15), 2**15, (2, 1, 2, 4, 4), dtype=torch.int16)
    maps = [QTensor(v, torch.tensor([2.0**-15]), "qint16") for v in values]
    made = qat_form(layer, get_default_qat_qconfig(dtype="qint16"), "near.correlation")
    made.activation_post_process.set_qparams(2.0**-15)
    converted = fixed_point_form(made, "near.correlation", "half_up")
    acc = correlated(*(v.numpy().astype(np.int64) for v in values), layer)
    expected = np.floor(acc * (2.0**-15 / 2) + 0.5)
    assert np.array_equal(converted(*maps).int_repr().numpy(), np.clip(expected, -(2**15), 32767))
    full = QTensor(torch.full((1, 3, 4, 4), -(2**15)).to(torch.int16), maps[0].scale, "qint16")
    with pytest.raises(AccumulatorOverflowError, match=r"near\.correlation.*leave int32"):
        converted(full, full)


def test_gradients_are_those_of_differences() -> None:
    x, y = (torch.randn(1, 2, 4, 3, dtype=torch.double, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(Correlation(3, 1, 2, 1, 2), (x, y))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"kernel_size": 2}, "kernel_size=2: expected an odd number"),
        ({"kernel_size": 0}, "kernel_size=0: expected an integer from 1"),
        ({"stride2": 1.5}, r"stride2=1\.5: expected an integer from 1"),
        ({"pad_size": -1}, "pad_size=-1: expected an integer from 0"),
        ({"is_multiply": False}, "is_multiply=False.*leave it True"),
    ],
)
def test_settings_that_do_not_fit_are_named(given: dict, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Correlation(**given)


def test_maps_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"same shape, got \(1, 2, 3, 3\) and \(1, 2, 3, 4\)"):
        Correlation()(torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"expected two maps \[N, C, H, W\]"):
        Correlation()(torch.zeros(2, 3, 3), torch.zeros(2, 3, 3))
    with pytest.raises(ValueError, match=r"maps of 4 × 9 leave no place with kernel_size=1, max_d"):
        Correlation(max_displacement=2)(torch.zeros(1, 2, 4, 9), torch.zeros(1, 2, 4, 9))
    floats = torch.zeros(1, 2, 5, 5)
    half = QTensor(floats, torch.tensor([0.1]), "qint8")
    with pytest.raises(TypeError, match="its second input is a float tensor"):
        qat_form(Correlation(), QAT, "flow")(half, floats)
