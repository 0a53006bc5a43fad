"""Maps large enough for compiled loops over their pixels, in either memory format."""

import pytest
import torch

from bevquant_int8sim import int8_conv2d, int8_max_pool

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
