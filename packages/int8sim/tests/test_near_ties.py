"""Requantization of values so near a tie that float32 would round them the other way."""

import numpy as np
import pytest
import torch

from bevquant_int8sim import int8_conv2d, int8_sparse_conv
from bevquant_sparse import WeightLayout, build_rulebook

CHANNELS = 64
OFFSETS = (-(2.0**-40), -(2.0**-26), 0.0, 2.0**-26, 2.0**-40, 1e-5, -1e-5, 1e-3)


def near_ties(seed, sign=1):
    """int32 accumulators and multipliers whose products are next to k + ½."""
    random = np.random.default_rng(seed)
    acc = random.integers(1000, 2**30, CHANNELS) * sign
    ties = random.integers(-128, 128, CHANNELS) + 0.5
    ties = np.abs(ties) * (1 + np.resize(OFFSETS, CHANNELS))
    multiplier = ties / np.abs(acc)
    return torch.from_numpy(acc).int(), torch.from_numpy(multiplier)


def expected(values, low=-128):
    return torch.from_numpy(np.clip(np.rint(values), low, 127)).to(torch.int8)


def sums(acc, rows):
    """Inputs and weights of zeros: the bias is all that the accumulators have."""
    x = torch.zeros(1, 4, rows, 1, dtype=torch.int8).contiguous(memory_format=torch.channels_last)
    return x, torch.zeros(CHANNELS, 4, 1, 1, dtype=torch.int8), acc


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("seed", range(4))
def test_alone(backend, seed, sign, relu):
    acc, multiplier = near_ties(seed, sign)
    q = int8_conv2d(*sums(acc, 7), multiplier=multiplier, relu=relu, backend=backend)
    values = acc.double().numpy() * multiplier.numpy()
    assert (np.float32(acc.numpy()) * np.float32(multiplier.numpy()) % 1 == 0.5).any()
    assert torch.equal(q[0, :, 3, 0], expected(values, 0 if relu else -128))
    assert (q == q[:, :, :1]).all()


@pytest.mark.parametrize("scale", [0.37, 1.0, 3.0, 1e7])
@pytest.mark.parametrize("seed", range(4))
def test_with_an_addend(backend, seed, scale):
    """Scales above 1 let large terms cancel, which float32 cannot follow."""
    random = np.random.default_rng(seed)
    addend = random.integers(-128, 128, CHANNELS)
    acc, _ = near_ties(seed)
    ties = random.integers(-100, 100, CHANNELS) + 0.5
    wanted = (ties - addend * scale) / acc.numpy()
    acc = torch.where(torch.from_numpy(wanted) < 0, -acc, acc)
    multiplier = torch.from_numpy(np.abs(wanted)) + 2.0**-60
    other = torch.from_numpy(addend).to(torch.int8).view(1, -1, 1, 1).repeat(1, 1, 7, 1)
    q = int8_conv2d(
        *sums(acc, 7), multiplier=multiplier, addend=other, addend_multiplier=scale, backend=backend
    )
    values = acc.double().numpy() * multiplier.numpy() + addend * scale
    assert torch.equal(q[0, :, 3, 0], expected(values))


@pytest.mark.parametrize("scale", [0.5, 0.5 + 2.0**-40, 0.37])
@pytest.mark.parametrize("seed", range(4))
def test_with_a_residual(backend, seed, scale):
    acc, multiplier = near_ties(seed)
    residual = torch.from_numpy(np.random.default_rng(seed).integers(-128, 128, (9, CHANNELS)))
    coords = torch.tensor([[0, 0, 0, i] for i in range(9)], dtype=torch.int32)
    rulebook = build_rulebook(coords, (1, 1, 9), 1, subm=True)
    q = int8_sparse_conv(
        torch.zeros(9, 4, dtype=torch.int8), torch.zeros(1, 4, CHANNELS, dtype=torch.int8), acc,
        rulebook, layout=WeightLayout.VCK, multiplier=multiplier,
        residual=residual.to(torch.int8), sum_multiplier=scale, backend=backend,
    )  # fmt: skip
    first = expected(acc.double().numpy() * multiplier.numpy()).numpy()
    total = (first + residual.numpy()) * scale
    assert scale != 0.5 or (total % 1 == 0.5).any()
    assert torch.equal(q, expected(total))


@pytest.mark.parametrize("multiplier", [2.0**100, 1e300, 1e-30])
def test_multipliers_beyond_float32(backend, multiplier):
    acc = torch.arange(-32, 32, dtype=torch.int32)
    q = int8_conv2d(*sums(acc, 7), multiplier=multiplier, backend=backend)
    assert torch.equal(q[0, :, 3, 0], expected(acc.double().numpy() * multiplier))
