"""Maps large enough for compiled loops over their pixels, and weights that are taken by pieces."""

import numpy as np
import pytest
import torch

from bevquant_int8sim import int8_conv2d, int8_linear, int8_max_pool, quantize
from bevquant_int8sim._scales import sums_of_sizes

POOLS = [
    dict(kernel_size=3, stride=2, padding=1),
    dict(kernel_size=(2, 3), stride=(2, 1), padding=(0, 1), ceil_mode=True),
    dict(kernel_size=3, stride=3, padding=1, dilation=2),
    dict(kernel_size=5, stride=2, padding=2, ceil_mode=True),
]


def map_of(*shape):
    values = torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(1))
    return values.to(torch.int8)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("settings", POOLS)
def test_max_pool(settings, memory_format):
    x = map_of(2, 33, 41, 38)
    expected = torch.nn.functional.max_pool2d(x.double(), **settings)
    assert torch.equal(
        int8_max_pool(x.contiguous(memory_format=memory_format), **settings).double(), expected
    )


@pytest.mark.parametrize("channels", [3, 66, 128])
def test_planes_of_channels(channels, backend):
    x, weight = map_of(2, channels, 37, 61), map_of(16, channels, 3, 3)
    expected = torch.nn.functional.conv2d(x.double(), weight.double(), padding=1)
    assert torch.equal(int8_conv2d(x, weight, padding=1, backend=backend).double(), expected)


ROWS = 131  # of 3·96·64 values: two pieces, of 66 and 65


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("rounding", ["half_even", "half_up"])
def test_weights_are_quantized_by_pieces(memory_format, rounding):
    weight = torch.randn(ROWS, 3, 96, 64, generator=torch.Generator().manual_seed(0))
    weight = weight.contiguous(memory_format=memory_format)
    scale = torch.linspace(0.01, 0.1, ROWS)
    made = quantize(weight, scale, rounding=rounding)
    steps = weight.double() / scale.double().view(-1, 1, 1, 1)
    steps = steps.round() if rounding == "half_even" else (steps + 0.5).floor()
    assert torch.equal(made, steps.clamp(-128, 127).to(torch.int8))
    assert made.stride() == weight.stride()
    weight[-1, -1, -1, -1] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        quantize(weight, scale)


@pytest.mark.parametrize("axis", [0, 3, -1])
def test_sizes_of_weights_are_summed_by_pieces(axis):
    weight = map_of(65, 3, 96, 130)
    rest = [a for a in range(4) if a != axis % 4]
    wanted = np.abs(weight.numpy().astype(np.int64)).sum(tuple(rest))
    assert np.array_equal(sums_of_sizes(weight, axis).numpy(), wanted)


def test_a_linear_layer_of_more_than_a_million_weights(backend):
    x, weight = map_of(3, 1100), map_of(1003, 1100)
    expected = x.double() @ weight.double().T
    assert torch.equal(int8_linear(x, weight, backend=backend).double(), expected)
