import copy

import pytest
import torch
from torch import nn

from bevquant_quantizers import QuantDescriptor, TensorQuantizer
from bevquant_quantizers.calib import HistogramCalibrator, calibrate_weights


def quantized(module, axis=0):
    module.weight_quantizer = TensorQuantizer(QuantDescriptor(axis=axis))
    return module


def modules():
    torch.manual_seed(3)
    return [nn.Conv2d(6, 5, 3), nn.Linear(40, 7), nn.ConvTranspose2d(5, 4, 3)]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("method", ["mse", "percentile", "max"])
@pytest.mark.parametrize("perchannel", [True, False])
def test_like_upstream(upstream, number, method, perchannel):
    ours = quantized(modules()[number])
    kind = getattr(upstream.nn, "Quant" + type(ours).__name__)
    theirs = kind(*{0: (6, 5, 3), 1: (40, 7), 2: (5, 4, 3)}[number])
    theirs.weight = copy.deepcopy(ours.weight)
    calibrate_weights(ours, method, perchannel, num_bins=2048 if not perchannel else 300)
    if method == "max" and not perchannel:  # upstream fails here
        assert ours.weight_quantizer.amax == ours.weight.abs().max()
        return
    upstream.calib.calibrate_weights(
        theirs, method, perchannel, num_bins=2048 if not perchannel else 300
    )
    a, b = ours.weight_quantizer.amax, theirs.weight_quantizer.amax
    assert a.shape == b.shape
    axis = 1 if number == 2 else 0
    largest = ours.weight.detach().abs()
    largest = (
        largest.movedim(axis, 0).flatten(1).amax(1).view(a.shape) if perchannel else largest.max()
    )
    assert bool(((a == b) | (a == largest)).all())
    assert perchannel or method == "mse" or torch.equal(a, b)


def test_is_the_calibrator_on_each_channel():
    layer = quantized(nn.Conv2d(6, 5, 3))
    calibrate_weights(layer, "percentile", percentile=90.0)
    for row, amax in zip(layer.weight.detach(), layer.weight_quantizer.amax.flatten(), strict=True):
        alone = HistogramCalibrator(8, None, False)
        alone.collect(row)
        assert float(alone.compute_amax("percentile", percentile=90.0)) == pytest.approx(
            float(amax), rel=1e-2
        )


def test_axis_of_the_quantizer():
    """A sparse convolution's weight [k, k, k, in, out] is quantized along axis 4."""
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.randn(3, 3, 3, 4, 6))
    calibrate_weights(quantized(layer, axis=4), "max")
    assert torch.equal(
        layer.weight_quantizer.amax, layer.weight.detach().abs().amax((0, 1, 2, 3), keepdim=True)
    )


@pytest.mark.parametrize(("axis", "along"), [((1,), 1), ((1, 2), 0), (None, 0)])
def test_of_several_axes_it_is_the_output_channels(axis, along):
    layer = quantized(nn.Conv2d(6, 5, 3), axis)
    calibrate_weights(layer, "max")
    shape = [size if place == along else 1 for place, size in enumerate(layer.weight.shape)]
    assert list(layer.weight_quantizer.amax.shape) == shape


def test_num_bins_holds_per_tensor_too():
    """Upstream always takes 2048 there."""
    layer = quantized(nn.Linear(50, 50))
    found = []
    for bins in (64, 2048):
        calibrate_weights(layer, "percentile", False, 99.0, bins)
        found.append(float(layer.weight_quantizer.amax))
    largest = float(layer.weight.detach().abs().max())
    assert found[0] / largest * 64 == pytest.approx(round(found[0] / largest * 64), abs=1e-4)
    assert found[0] != found[1]


@pytest.mark.parametrize("method", ["mse", "percentile", "entropy", "max"])
def test_dead_channel(method):
    layer = quantized(nn.Linear(30, 4))
    layer.weight.data[2] = 0
    calibrate_weights(layer, method)
    amax = layer.weight_quantizer.amax
    assert amax.shape == (4, 1)
    assert (amax.flatten() == 0).tolist() == [False, False, True, False]
    assert amax.isfinite().all()


def test_errors():
    layer = quantized(nn.Linear(3, 3))
    with pytest.raises(TypeError, match="Unknown calibration method"):
        calibrate_weights(layer, "kl")
    layer.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"0\.weight holds NaN"):
        calibrate_weights(nn.Sequential(layer))
