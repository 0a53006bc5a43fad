"""A convolution that adds another tensor before it rounds, and models in which it does so."""

import pytest
import torch
from torch import nn

from bevquant_int8sim import int8_conv2d, simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)


def expected(x, weight, bias, multiplier, addend, factor, relu, **settings):
    groups = settings.pop("groups", 1)
    acc = nn.functional.conv2d(
        x.double(), weight.double(), bias.double(), groups=groups, **settings
    )
    total = torch.round(acc * multiplier.view(-1, 1, 1) + addend.double() * factor)
    return total.clamp(0 if relu else -128, 127).to(torch.int8)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(
    ("channels", "groups", "memory_format"),
    [(16, 1, torch.channels_last), (21, 1, torch.contiguous_format), (24, 3, torch.channels_last)],
)
def test_equals_a_float64_sum(backend, channels, groups, memory_format, relu):
    x, weight = numbers(2, 12, 9, 7), numbers(channels, 12 // groups, 3, 3, seed=1)
    bias = numbers(channels, seed=2).int() * 50
    multiplier = torch.rand(channels, dtype=torch.float64) / 3000
    settings = dict(padding=1, stride=2, groups=groups)
    for seed in (3, 4):  # the second time by what was kept
        addend = numbers(2, channels, 5, 4, seed=seed).contiguous(memory_format=memory_format)
        q = int8_conv2d(
            x, weight, bias, multiplier=multiplier, addend=addend, addend_multiplier=0.37,
            relu=relu, backend=backend, **settings,
        )  # fmt: skip
        assert torch.equal(q, expected(x, weight, bias, multiplier, addend, 0.37, relu, **settings))


def test_ties_of_the_sum(backend):
    """Halves that only the sum has: rounding either part first would move them."""
    x, weight = numbers(1, 16, 8, 8), torch.eye(16, dtype=torch.int8).view(16, 16, 1, 1)
    addend = numbers(1, 16, 8, 8, seed=1)
    q = int8_conv2d(
        x, weight, multiplier=0.25, addend=addend, addend_multiplier=0.25, backend=backend
    )
    exact = (x.double() + addend.double()) / 4
    assert int((exact % 1 == 0.5).sum()) > 0
    assert torch.equal(q, torch.round(exact).to(torch.int8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(addend=numbers(1, 8, 4, 5)), r"expected an addend \[1, 8, 4, 4\]"),
        (dict(addend=numbers(1, 8, 4, 4).int()), "addend"),
        (dict(addend_multiplier=0.0), "addend_multiplier"),
        (dict(multiplier=None), "needs a multiplier"),
        (dict(out_dtype=torch.int16), "out_dtype torch.int8"),
        (dict(rounding="half_up"), "half_even"),
        (dict(arithmetic="fixed_point"), "float64"),
    ],
)
def test_refusals(change, message):
    settings = dict(multiplier=0.1, addend=numbers(1, 8, 4, 4), addend_multiplier=0.5)
    with pytest.raises((ValueError, TypeError), match=message):
        int8_conv2d(numbers(1, 4, 4, 4), numbers(8, 4, 1, 1), **{**settings, **change})


class Block(nn.Module):
    """A residual block whose skip connection is (not) a convolution, and a reader of the sum."""

    def __init__(self, down):
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 8, 1)
        self.down = nn.Conv2d(8, 8, 1) if down else nn.Identity()
        self.reader = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = torch.relu(self.first(x))
        h = self.last(x)
        return self.reader(torch.relu(h + self.down(x)))


@pytest.mark.parametrize("down", [False, True])
def test_models_add_in_the_convolution(backend, down):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 11, 10)
    net = quantize_model(Block(down).eval(), example_inputs=(x,)).model
    with torch.no_grad():
        calibrate(net, [(x,)], method="max")
    model = simulate(net, (x,), backend=backend)
    plain, _ = model.run((x,))
    assert torch.equal(model(x), plain)
    assert [s.op for s in model.steps].count("add") == 1
    assert [s.op for s in model._fast.steps].count("add") == 0


class Context(nn.Module):
    """A map and what its average makes, one value per channel, in either order of the sum."""

    def __init__(self, spread_last):
        super().__init__()
        self.stem, self.context = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.reader, self.spread_last = nn.Conv2d(8, 4, 1), spread_last

    def forward(self, x):
        x = self.stem(x)
        y = x.mean((2, 3), keepdim=True)
        y = x + self.context(y) if self.spread_last else self.context(x) + y
        return self.reader(torch.relu(y))


@pytest.mark.parametrize("spread_last", [False, True])
def test_a_sum_that_spreads_one_of_its_parts_is_the_same_in_a_call(backend, spread_last):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 9)
    net = quantize_model(Context(spread_last).eval(), example_inputs=(x,)).model
    calibrate(net, [(x,)], method="max")
    model = simulate(net, (x,), backend=backend)
    assert torch.equal(model(x), model.run((x,))[0])
