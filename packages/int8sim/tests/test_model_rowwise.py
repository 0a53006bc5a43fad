"""One pass over memory gives what torch's passes give, in every memory layout."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from bevquant_int8sim import dequantize, quantize, requantize
from bevquant_int8sim.model import _rowwise

pytest.importorskip("numba")

SHAPE = (2, 24, 31, 37)  # more values than the threshold for kernels


def laid_out(x, layout):
    """The same values in another order of memory, or with gaps between rows."""
    if layout == "channels last":
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "padded rows":
        wide = torch.zeros(*x.movedim(1, -1).shape[:-1], x.shape[1] + 8, dtype=x.dtype)
        wide[..., : x.shape[1]] = x.movedim(1, -1)
        return wide[..., : x.shape[1]].movedim(-1, 1)
    return x.contiguous()


LAYOUTS = ("contiguous", "channels last", "padded rows")


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def accumulators(generator):
    acc = torch.randint(-(2**20), 2**20, SHAPE, generator=generator, dtype=torch.int32)
    acc.view(-1)[:8] = torch.tensor([2**31 - 1, -(2**31), 0, 1, -1, 3, 5, -5])
    return acc


def bytes_of(generator):
    return torch.randint(-128, 128, SHAPE, generator=generator).to(torch.int8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("relu", [False, True])
def test_requantized(generator, layout, relu):
    acc = accumulators(generator)
    multiplier = torch.rand(24, generator=generator, dtype=torch.float64) * 1e-3
    multiplier[:4] = torch.tensor([0.5, 0.25, 1.5, 2.0**-20])
    expected = requantize(acc, multiplier, axis=1, relu=relu, narrow_range=True)
    got = _rowwise.requantized(
        laid_out(acc, layout), multiplier, 1, bits=8, narrow=True, relu=relu, name="x"
    )
    assert got.dtype == torch.int8
    assert torch.equal(got, expected)
    one = torch.tensor(0.5, dtype=torch.float64)
    x = bytes_of(generator)
    got = _rowwise.requantized(
        laid_out(x, layout), one, -1, bits=8, narrow=False, relu=relu, name="x"
    )
    assert torch.equal(got, requantize(x.int(), one, relu=relu))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("made", [accumulators, bytes_of])
def test_dequantized(generator, layout, relu, made):
    q, scales = made(generator), torch.rand(24, generator=generator, dtype=torch.float64) + 1e-6
    for scale in (scales * 1e-3, scales[0]):
        expected = dequantize(q, scale, axis=1)
        expected = expected.clamp(min=0) if relu else expected
        assert torch.equal(_rowwise.dequantized(laid_out(q, layout), scale, 1, relu=relu), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized(generator, layout, bits):
    x = torch.randn(SHAPE, generator=generator) * 3
    halves = torch.arange(-300, 300) * 0.5
    x.view(-1)[:600] = halves
    x.view(-1)[600:602] = torch.tensor([float("inf"), -float("inf")])
    for scale in (1.0, 0.1, 0.03):
        expected = quantize(x, scale, bits=bits)
        got = _rowwise.quantized(laid_out(x, layout), scale, bits=bits, narrow=False)
        assert torch.equal(got, expected)


def test_nan_is_refused(generator):
    x = torch.randn(SHAPE, generator=generator)
    x[1, 3, 30, 36] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        _rowwise.quantized(x, 1.0, bits=8, narrow=False)


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
def test_add(generator, first, second):
    acc, x = accumulators(generator), bytes_of(generator)
    scale = torch.rand(24, generator=generator, dtype=torch.float64) * 1e-4
    one = torch.tensor(0.37, dtype=torch.float64)
    values = acc.double() * scale.view(-1, 1, 1) + x.double() * one
    expected = torch.round(values).clamp(0, 127).to(torch.int8)
    operands = [laid_out(x, first), laid_out(acc, second)]
    assert torch.equal(_rowwise.add(operands, [one, scale], 1.0, 1, 0, 127), expected)
    y = bytes_of(generator)
    ones = [torch.ones((), dtype=torch.float64)] * 2
    expected = torch.round((x.double() + y.double()) * 0.5).clamp(-128, 127).to(torch.int8)
    operands = [laid_out(x, first), laid_out(y, second)]
    assert torch.equal(_rowwise.add(operands, ones, 0.5, -1, -128, 127), expected)


def test_same_without_numba(generator, monkeypatch):
    acc, x = accumulators(generator), bytes_of(generator)
    scale = torch.rand(24, generator=generator, dtype=torch.float64) * 1e-4
    one = torch.tensor(0.37, dtype=torch.float64)

    def results():
        floats = _rowwise.dequantized(acc, scale, 1, relu=False)
        return [
            _rowwise.add([acc, x], [scale, one], 1.0, 1, -128, 127),
            _rowwise.requantized(acc, scale, 1, bits=8, narrow=False, relu=False, name="x"),
            _rowwise.quantized(floats, 0.1, bits=8, narrow=False),
            floats,
        ]

    fast = results()
    assert _rowwise._kernels(x) is not None
    monkeypatch.setitem(sys.modules, "bevquant_int8sim._compiled", None)  # importing it fails
    assert _rowwise._kernels(x) is None
    assert all(torch.equal(a, b) for a, b in zip(fast, results(), strict=True))


def test_rows_of_features(generator):
    acc = torch.randint(-(2**20), 2**20, (3000, 17), generator=generator, dtype=torch.int32)
    scale = torch.rand(17, generator=generator, dtype=torch.float64) * 1e-4
    got = _rowwise.requantized(acc, scale, -1, bits=8, narrow=False, relu=True, name="x")
    expected = np.clip(np.rint(acc.numpy() * scale.numpy()), 0, 127)
    assert (got.numpy() == expected).all()
