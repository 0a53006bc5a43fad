"""What simulate() and an integer model refuse, and what their messages say."""

import pytest
import torch
from torch import nn

from bevquant_int8sim import simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate

X = torch.linspace(-1, 1, 96).view(2, 3, 4, 4)


def calibrated(net, x=X):
    quantized = quantize_model(net.eval(), example_inputs=x).model
    calibrate(quantized, [x], method="max")
    return quantized


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))


def test_uncalibrated():
    net = quantize_model(small().eval(), example_inputs=X).model
    with pytest.raises(ValueError, match=r"2 quantizers .*0\._input_quantizer .*not calibrated"):
        simulate(net, X)


@pytest.mark.parametrize("amax", [float("nan"), float("inf"), 0.0, -1.0, 1e-40])
def test_unusable_range(amax):
    net = calibrated(small())
    net[2]._input_quantizer._amax.fill_(amax)
    with pytest.raises(ValueError, match=r"2\._input_quantizer .*calibrate"):
        simulate(net, X)


def test_zero_range_of_a_weight_that_is_not_zero():
    net = calibrated(small())
    net[0]._weight_quantizer.amax = torch.tensor([1.0, 0.0, 1.0, 1.0]).view(4, 1, 1, 1)
    with pytest.raises(ValueError, match=r"0: the weight's range of channel 1 is zero"):
        simulate(net, X)


def test_training_mode():
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        simulate(calibrated(small()).train(), X)


def test_forward_hooks():
    net = calibrated(small())
    net[1].register_forward_hook(lambda *_: None)
    wrapped = nn.Sequential(net).eval()
    net.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks"):
        simulate(wrapped, X)


def test_forward_that_cannot_be_followed():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small()

        def forward(self, x):
            return self.net(x) if float(x.sum()) > 0 else x

    with pytest.raises(ValueError, match="Branching cannot be followed"):
        simulate(calibrated(Branching(), X + 1), X)


def test_other_inputs_than_the_examples():
    model = simulate(calibrated(small()), X)
    with pytest.raises(TypeError, match=r"expected 1 positional inputs .* got 2"):
        model(X, X)
    with pytest.raises(TypeError, match="expected a tensor"):
        model("image")


def test_nan_names_the_place():
    model = simulate(calibrated(small()), X)
    with pytest.raises(ValueError, match="NaN"):
        model(torch.full_like(X, float("nan")))
