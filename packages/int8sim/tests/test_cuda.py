"""On a GPU the same functions give the integers that they give on the CPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from bevquant_int8sim import (
    AccumulatorOverflowError,
    IntegerModel,
    dequantize,
    int8_add,
    int8_avg_pool,
    int8_concat,
    int8_conv1d,
    int8_conv2d,
    int8_conv3d,
    int8_conv_transpose2d,
    int8_leaky_relu,
    int8_linear,
    int8_lookup,
    int8_max_pool,
    int8_relu,
    int8_relu6,
    int8_resize,
    int8_sparse_conv,
    int8_to_dense,
    lookup_table,
    quantize,
    quantize_bias,
    requantize,
    simulate,
)
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate
from bevquant_sparse import WeightLayout, build_rulebook

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def numbers(*shape, dtype=torch.int8):
    info = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(info.min, info.max + 1, shape, generator=generator).to(dtype)


X = numbers(2, 24, 9, 8)
BIAS = numbers(20, dtype=torch.int16).int()
ACC = numbers(50, 20, dtype=torch.int16).int() * 997
FACTORS = torch.linspace(1e-4, 3e-3, 20, dtype=torch.float64)
TABLE = lookup_table(torch.tanh, 0.02, 1 / 127)
CALLS = {
    "quantize": (lambda x: quantize(x, 0.03), [torch.linspace(-5, 5, 999)]),
    "dequantize": (lambda a, f: dequantize(a, f, axis=1), [ACC, FACTORS]),
    "quantize_bias": (lambda b: quantize_bias(b, 0.1, FACTORS), [torch.linspace(-2, 2, 20)]),
    "requantize": (lambda a, f: requantize(a, f, rounding="half_up"), [ACC, FACTORS]),
    "requantize, fixed point": (
        lambda a, f: requantize(a, f, arithmetic="fixed_point"), [ACC, FACTORS],
    ),
    "linear": (
        lambda x, w, b, f: int8_linear(x, w, b, multiplier=f, relu=True),
        [numbers(33, 70), numbers(20, 70), BIAS, FACTORS],
    ),
    "linear, few rows": (lambda x, w: int8_linear(x, w), [numbers(3, 70), numbers(20, 70)]),
    "linear, int16": (
        lambda x, w: int8_linear(x, w), [numbers(33, 70, dtype=torch.int16), numbers(20, 70)],
    ),
    "conv1d": (
        lambda x, w: int8_conv1d(x, w, padding=[(2, 0)]), [numbers(2, 7, 30), numbers(5, 7, 3)],
    ),
    "conv2d": (
        lambda x, w, b, f: int8_conv2d(x, w, b, multiplier=f, padding=1),
        [X, numbers(20, 24, 3, 3), BIAS, FACTORS],
    ),
    "conv2d, groups": (
        lambda x, w: int8_conv2d(x, w, groups=4, stride=2, dilation=2, padding=((1, 2), (0, 3))),
        [X, numbers(20, 6, 3, 3)],
    ),
    "conv2d, float": (
        lambda x, w, f: int8_conv2d(x, w, multiplier=f, out_dtype=torch.float32),
        [X, numbers(20, 24, 1, 1), FACTORS],
    ),
    "conv3d": (
        lambda x, w: int8_conv3d(x, w, padding=1),
        [numbers(1, 5, 4, 6, 7), numbers(9, 5, 3, 3, 3)],
    ),
    "conv_transpose2d": (
        lambda x, w, b: int8_conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
        [X, numbers(24, 20, 3, 3), BIAS],
    ),
    "add": (lambda a, b: int8_add(a, b, 0.7, 0.4), [X, X.flip(0)]),
    "add, fixed point": (
        lambda a, b: int8_add(a, b, 0.7, 0.4, arithmetic="fixed_point", rounding="half_up"),
        [X, X.flip(0)],
    ),
    "concat": (lambda a, b: int8_concat([a, b], [1.0, 0.4]), [X, X.flip(0)]),
    "max_pool": (lambda x: int8_max_pool(x, 3, 2, 1), [X]),
    "avg_pool": (lambda x: int8_avg_pool(x, 3, 2, 1, count_include_pad=False), [X]),
    "nearest": (lambda x: int8_resize(x, (13, 5)), [X]),
    "bilinear": (lambda x: int8_resize(x, scale_factor=2.0, mode="bilinear"), [X]),
    "relu": (lambda x: int8_relu(x, 1.7), [X]),
    "relu6": (lambda x: int8_relu6(x, 0.1, 0.05), [X]),
    "leaky_relu": (lambda x: int8_leaky_relu(x, 0.1, 1.7), [X]),
    "lookup": (lambda x, t: int8_lookup(x, t), [X, TABLE]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_kernels(name):
    call, operands = CALLS[name]
    result = call(*(operand.cuda() for operand in operands))
    assert result.is_cuda
    assert torch.equal(result.cpu(), call(*operands))


@pytest.mark.parametrize("kind", ["subm", "strided", "transposed", "inverse"])
def test_sparse_convolutions(kind, random_voxels):
    shape = (12, 11, 10)
    indices = random_voxels(np.random.default_rng(0), 2, shape, 400)
    w, multiplier = numbers(27, 16, 20), FACTORS / 10
    results = []
    for device in ("cpu", "cuda"):
        geometry = dict(subm=True) if kind == "subm" else dict(stride=2, padding=1, subm=False)
        rulebook = build_rulebook(
            indices.to(device), shape, 3, batch_size=2, transposed=kind == "transposed", **geometry
        )
        rulebook = rulebook.inverse() if kind == "inverse" else rulebook
        x = numbers(rulebook.num_in, 16)
        results.append(
            int8_sparse_conv(
                x.to(device), w.to(device), BIAS.to(device), rulebook, layout=WeightLayout.VCK,
                multiplier=multiplier.to(device), relu=True,
            )
        )  # fmt: skip
    assert results[1].is_cuda
    assert torch.equal(results[0], results[1].cpu())
    place = indices.cuda()
    dense = int8_to_dense(numbers(400, 5).cuda(), place, shape, 2)
    assert torch.equal(dense.cpu(), int8_to_dense(numbers(400, 5), indices, shape, 2))


def test_overflow_is_named():
    x = torch.full((40, 600), 32767, dtype=torch.int16, device="cuda")
    w = torch.full((3, 600), 127, dtype=torch.int8, device="cuda")
    with pytest.raises(AccumulatorOverflowError, match=r"fc: .* 33 bits"):
        int8_linear(x, w, name="fc")


def test_operands_on_two_devices_are_refused():
    with pytest.raises(ValueError, match="fc: weight on cpu, x on cuda:0"):
        int8_linear(numbers(3, 4).cuda(), numbers(5, 4), name="fc")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2))
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.act = nn.LeakyReLU(0.1)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(self.conv(x) + x)
        return self.head(self.up(self.act(x)).mean((2, 3)))


def test_a_model(tmp_path):
    torch.manual_seed(0)
    images = torch.randn(2, 3, 48, 40)
    net = quantize_model(Net().eval(), example_inputs=images).model
    calibrate(net, [images], method="max")
    model = simulate(net, images)
    model.save(tmp_path / "model")
    there = simulate(copy.deepcopy(net).cuda(), images.cuda())
    loaded = IntegerModel.load(tmp_path / "model", device="cuda")
    _, expected = model.run(images)
    _, made = there.run(images.cuda())
    for path in ("stem.0", "conv:int32"):
        assert torch.equal(made[path].value.cpu(), expected[path].value)
    assert torch.equal(there(images.cuda()), loaded(images.cuda()))
    assert torch.allclose(there(images.cuda()).cpu(), model(images), atol=1e-2)
