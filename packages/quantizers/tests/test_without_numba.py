"""What numba's kernels compute is computed without them too, wherever "auto" chooses."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from bevquant_quantizers import QuantDescriptor, TensorQuantizer, calib, calibrate, fake_quantize


def test_the_choice_follows_the_installation(with_and_without_numba):
    x = torch.randn(40_000)
    wanted = fake_quantize(x, 1.0, backend="torch")
    assert torch.equal(fake_quantize(x, 1.0), wanted)
    with pytest.raises(ValueError, match="backend must be"):
        fake_quantize(x, 1.0, backend="numpy")
    if with_and_without_numba:
        assert torch.equal(fake_quantize(x, 1.0, backend="numba"), wanted)
        assert torch.equal(fake_quantize(x[:8], 1.0, backend="numba"), wanted[:8])
        return
    with pytest.raises(ImportError):
        importlib.import_module("numba")
    with pytest.raises(ImportError, match="pip install"):
        fake_quantize(x, 1.0, backend="numba")


@pytest.mark.parametrize("unsigned", [False, True])
def test_fake_quantization_and_its_gradient(with_and_without_numba, unsigned):
    """Against round, clamp and scale written out."""
    x = torch.randn(3, 40_000).abs_() if unsigned else torch.randn(3, 40_000)
    amax = torch.tensor([[0.5], [1.5], [3.0]])
    leaf = x.clone().requires_grad_()
    y = fake_quantize(leaf, amax, 8, unsigned)
    top = 255.0 if unsigned else 127.0
    scale = torch.tensor(top) / amax
    wanted = (x * scale).round().clamp(0.0 if unsigned else -top, top) / scale
    assert torch.equal(y.detach(), wanted)
    weight = torch.randn(3, 40_000)
    y.backward(weight)
    assert torch.equal(leaf.grad, torch.where(x.abs() <= amax, weight, 0.0))


def test_histogram(with_and_without_numba):
    x = torch.randn(50_000)
    calibrator = calib.HistogramCalibrator(8, None, False, num_bins=512)
    calibrator.collect(x)
    counts = torch.histc(x.abs(), 512, 0, x.abs().max())
    assert calibrator._calib_hist.tolist() == counts.tolist()
    calibrator.collect(2 * x)
    assert int(calibrator._calib_hist.sum()) == 100_000
    assert len(calibrator._calib_hist) == 1024 + 1


@pytest.mark.parametrize("method", ["mse", "entropy", "percentile"])
def test_calibration(with_and_without_numba, method):
    """The whole of it; each form is held against the other's figures by the definitions."""
    model = nn.Sequential(TensorQuantizer(QuantDescriptor(calib_method="histogram")))
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(30_000, generator=generator) * s for s in (1, 2.5)]
    (amax,) = calibrate(model, batches, method=method, percentile=99)["0"].amax
    both = torch.cat(batches)
    if method == "percentile":
        assert amax == pytest.approx(both.abs().quantile(0.99).item(), rel=0.01)
        return
    assert 0.3 < amax / both.abs().max() <= 1
    if method == "mse":
        losses = [
            ((fake_quantize(both, a) - both) ** 2).sum() for a in (amax, amax * 0.9, amax * 1.1)
        ]
        assert losses[0] == min(losses)
