"""What compiled kernels compute is computed without them too, wherever "auto" chooses."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_int8sim import (
    backend_report,
    int8_conv2d,
    int8_conv_transpose2d,
    int8_linear,
    int8_max_pool,
    int8_sparse_conv,
    int8_to_dense,
    plan_rulebook,
    simulate,
)
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate
from bevquant_sparse import WeightLayout


@pytest.fixture
def numba_away(monkeypatch, forget_backends):
    """A context as where numba is not installed: importing it, or what needs it, fails."""

    @contextmanager
    def away():
        kernels = [name for name in sys.modules if name.startswith("bevquant_int8sim._compiled")]
        with monkeypatch.context() as patch:
            for name in ("numba", "bevquant_int8sim._compiled", *kernels):
                patch.setitem(sys.modules, name, None)
            for name in ("bevquant_sparse._conv_numba", "bevquant_sparse._rulebook_numba"):
                patch.setitem(sys.modules, name, None)
            forget_backends()
            yield
        forget_backends()

    return away


def bytes_of(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def voxels(shape, share, seed=0):
    mask = torch.rand(1, *shape, generator=torch.Generator().manual_seed(seed)) < share
    return mask.nonzero().int().contiguous()


def test_torch_alone_is_left(numba_away):
    with numba_away():
        assert [s.name for s in backend_report() if s.available] == ["torch"]
        with pytest.raises(ValueError, match="needs numba: pip install numba"):
            int8_linear(bytes_of(2, 3), bytes_of(4, 3), backend="portable")


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (int8_conv2d, (bytes_of(1, 24, 30, 31), bytes_of(16, 24, 3, 3, seed=1))),
        (int8_conv_transpose2d, (bytes_of(1, 24, 9, 9), bytes_of(24, 8, 2, 2, seed=1))),
        (int8_linear, (bytes_of(300, 40), bytes_of(20, 40, seed=1))),
    ],
)
def test_sums_of_products(numba_away, call, arguments):
    """Against float64, which holds these sums exactly."""
    exact = {
        int8_conv2d: F.conv2d,
        int8_conv_transpose2d: F.conv_transpose2d,
        int8_linear: F.linear,
    }[call](*(a.double() for a in arguments))
    with numba_away():
        assert torch.equal(call(*arguments).double(), exact)
    assert torch.equal(call(*arguments).double(), exact)


def test_pooling_and_scattering(numba_away):
    x, places = bytes_of(1, 16, 64, 64), voxels((20, 30, 8), 0.2)
    features = bytes_of(len(places), 16, seed=2)
    wanted = F.max_pool2d(x.double(), 3, 2, 1)
    grid = torch.zeros(1, 16, 20, 30, 8, dtype=torch.int8)
    grid.movedim(1, -1)[places.long().unbind(1)] = features
    with numba_away():
        pooled, dense = int8_max_pool(x, 3, 2, 1), int8_to_dense(features, places, (20, 30, 8), 1)
    assert torch.equal(pooled.double(), wanted)
    assert torch.equal(dense, grid)
    assert torch.equal(int8_max_pool(x, 3, 2, 1), pooled)
    assert torch.equal(int8_to_dense(features, places, (20, 30, 8), 1), dense)


@pytest.mark.parametrize("subm", [True, False])
def test_sparse_convolutions(numba_away, subm):
    """Against a dense convolution of the scattered voxels, in float64."""
    shape, places = (16, 18, 9), voxels((16, 18, 9), 0.15)
    features, weight = bytes_of(len(places), 16), bytes_of(3, 3, 3, 16, 24, seed=1)
    given = {
        "kernel_size": 3,
        "stride": 1 if subm else 2,
        "padding": 1,
        "subm": subm,
        "batch_size": 1,
    }

    def run():
        rulebook = plan_rulebook(places, shape, **given)
        made = int8_sparse_conv(features, weight, None, rulebook, layout=WeightLayout.RSCK)
        return rulebook.out_indices, made

    with numba_away():
        rows, sums = run()
    grid = int8_to_dense(features, places, shape, 1).double()
    dense = F.conv3d(
        grid, weight.double().permute(4, 3, 0, 1, 2), stride=given["stride"], padding=1
    )
    assert torch.equal(sums.double(), dense.movedim(1, -1)[rows.long().unbind(1)])
    fast_rows, fast_sums = run()
    assert torch.equal(fast_rows, rows)
    assert torch.equal(fast_sums, sums)


class Net(nn.Module):
    """A stride, a pooling, a sum of two branches, a transposed convolution, a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.side = nn.Conv2d(16, 16, 3, 1, 1)
        self.up, self.head = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.head(F.relu(self.up(F.relu(self.side(x) + x))))


def test_a_whole_model(numba_away):
    x = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(1))
    model = quantize_model(Net().eval(), example_inputs=x).model
    calibrate(model, [x])
    with torch.no_grad():
        wanted = model(x)
        with numba_away():
            slow = simulate(model, x)(x)
        fast = simulate(model, x)(x)
    assert torch.equal(slow, fast)
    # And it is the fake-quantized model's, but for ties and what follows from them.
    step = wanted.abs().max() / 127
    assert ((slow - wanted).abs() > step / 8).float().mean() < 0.1
    assert (slow - wanted).abs().max() < 3 * step
