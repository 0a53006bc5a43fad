"""Colour conversions against the real-number equations of BT.601."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import bevquant_hybrid as horizon
from bevquant_hybrid.nn.functional import bgr_to_yuv444
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.quantization import (
    QuantStub,
    convert_fx,
    get_default_qat_qconfig,
    prepare_qat_fx,
)


def reference(rgb: np.ndarray, swing: str) -> np.ndarray:
    """Y, U and V by the recommendation: luma, and colour differences divided by their span."""
    r, g, b = rgb.astype(np.float64)
    y = 0.299 * r + 0.587 * g + 0.114 * b
    u, v = (b - y) / 1.772, (r - y) / 1.402
    if swing == "full":
        return np.stack([y, u + 128, v + 128])
    return np.stack([16 + y * 219 / 255, 128 + u * 224 / 255, 128 + v * 224 / 255])


pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture
def pixels() -> torch.Tensor:
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 128.0, 255.0])] * 3)
    return torch.cat([corners, torch.randint(0, 256, (500, 3)).float()]).T.reshape(1, 3, -1, 1)


@pytest.mark.parametrize("swing", ["studio", "full"])
def test_yuv_is_within_a_step_of_the_equations(pixels, swing: str) -> None:
    expected = reference(pixels[0, :, :, 0].numpy(), swing)
    for convert, image in (
        (horizon.rgb2yuv, pixels),
        (horizon.bgr2yuv, pixels.flip(1)),
        (lambda x, swing: horizon.rgb2centered_yuv(x, swing) + 128, pixels),
        (lambda x, swing: horizon.bgr2centered_yuv(x, swing) + 128, pixels.flip(1)),
    ):
        result = convert(image, swing)[0, :, :, 0].numpy()
        assert np.array_equal(result, np.rint(result))
        assert np.abs(result - expected).max() <= 1.5


@pytest.mark.parametrize(
    ("swing", "low", "high"),
    [("studio", [16, 16, 16], [235, 240, 240]), ("full", [0, 0, 0], [255, 255, 255])],
)
def test_swings_have_the_documented_ranges(swing: str, low: list, high: list) -> None:
    corners = torch.cartesian_prod(*[torch.tensor([0, 255])] * 3).T.reshape(1, 3, 8, 1)
    yuv = horizon.rgb2yuv(corners.to(torch.uint8), swing)
    below, above = yuv.amin((0, 2, 3)) - torch.tensor(low), torch.tensor(high) - yuv.amax((0, 2, 3))
    assert 0 <= below.min() <= below.max() <= 1
    assert 0 <= above.min() <= above.max() <= 1
    grey = torch.arange(256.0).expand(1, 3, 1, 256)
    assert set(horizon.rgb2centered_yuv(grey, swing)[0, 1:].flatten().tolist()) == {0.0}


def test_grey_is_luma_and_colours_turn_around(pixels) -> None:
    luma = reference(pixels[0, :, :, 0].numpy(), "full")[:1]
    for gray, image in ((horizon.rgb2gray, pixels), (horizon.bgr2gray, pixels.flip(1))):
        result = gray(image)
        assert result.shape == (1, 1, pixels.shape[2], 1)
        assert np.abs(result[0, :, :, 0].numpy() - luma).max() <= 1.0
    centred = horizon.rgb2centered_gray(pixels)
    assert torch.equal(centred, horizon.bgr2centered_gray(pixels.flip(1)))
    assert torch.equal(centred, horizon.rgb2gray(pixels) - 128)
    assert torch.equal(horizon.rgb2bgr(horizon.bgr2rgb(pixels)), pixels)
    assert torch.equal(horizon.rgb2bgr(pixels)[0, 0], pixels[0, 2])


@pytest.mark.parametrize("swing", ["studio", "full"])
def test_decoded_and_quantized_as_three_steps_in_real_numbers(swing: str) -> None:
    yuv = torch.randint(-128, 128, (2, 3, 20, 20), dtype=torch.int8)
    mean, std, scale = [123.7, 116.3, 103.5], [58.4, 57.1, 57.4], 0.0173
    y, u, v = yuv.numpy().astype(np.float64).transpose(1, 0, 2, 3)
    if swing == "studio":
        y, u, v = (y + 112) * 255 / 219, u * 255 / 224, v * 255 / 224
    else:
        y = y + 128
    r, b = y + 1.402 * v, y + 1.772 * u
    rgb = np.clip(np.stack([r, (y - 0.299 * r - 0.114 * b) / 0.587, b]), 0, 255)
    step = np.float64(np.float32(scale))
    for convert, colours in (
        (horizon.centered_yuv2rgb, rgb),
        (horizon.centered_yuv2bgr, rgb[::-1]),
    ):
        exact = (colours - np.reshape(mean, (3, 1, 1, 1))) / np.reshape(std, (3, 1, 1, 1)) / step
        expected = np.clip(np.floor(exact + 0.5), -128, 127).transpose(1, 0, 2, 3)
        result = convert(
            QTensor(yuv, torch.ones(1), "qint8"), swing, mean, torch.tensor(std), scale
        )
        assert np.array_equal(result.int_repr().numpy(), expected)
        assert result.dtype == "qint8"
        assert result.scale.item() == pytest.approx(scale)
        assert torch.equal(
            convert(yuv.float(), swing, mean, std, scale).dequantize(), result.dequantize()
        )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.relu(self.bn(self.conv(self.quant(input))))


def test_one_number_is_the_mean_or_spread_of_every_channel():
    yuv = torch.randint(-128, 128, (1, 3, 2, 2)).float()
    expected = horizon.centered_yuv2rgb(yuv, "studio", [100.0] * 3, [64.0] * 3, 0.02).int_repr()
    for mean, std in ((100, 64.0), (torch.tensor(100.0), torch.tensor([64.0]))):
        found = horizon.centered_yuv2rgb(yuv, "studio", mean, std, 0.02)
        assert torch.equal(found.int_repr(), expected)


def test_a_model_that_trained_on_rgb_takes_yuv_as_documented() -> None:
    rgb = torch.randint(0, 256, (1, 3, 28, 28)).float()
    data = (rgb - 128) / 128
    qat = prepare_qat_fx(Net().eval(), {"": get_default_qat_qconfig()})
    qat(data)
    converted = convert_fx(qat)
    expected = converted(data).dequantize()
    scale = converted.quant.scale.clone()
    graph = converted.graph
    for node in list(graph.nodes):
        if node.target == "quant":
            with graph.inserting_after(node):
                settings = {"swing": "full", "q_scale": scale.item()}
                made = graph.call_function(horizon.functional.centered_yuv2rgb, (node,), settings)
                node.replace_all_uses_with(made)
                made.args = (node,)
    converted.quant.scale.fill_(1.0)
    converted.recompile()
    names = [(node.op, node.name) for node in graph.nodes]
    assert names == [
        ("placeholder", "input_1"),
        ("call_module", "quant"),
        ("call_function", "centered_yuv2rgb"),
        ("call_module", "conv"),
        ("output", "output"),
    ]
    assert str(list(graph.nodes)[2].target).startswith("<function centered_yuv2rgb at")
    result = converted(horizon.rgb2centered_yuv(rgb, "full")).dequantize()
    # YUV holds colours to about two steps of RGB, which the convolution's weights multiply.
    gain = (qat.conv.weight.abs().sum((1, 2, 3)) * 2 / 128).max().item()
    assert (result - expected).abs().max() <= 2 * gain
    yuv = horizon.rgb2centered_yuv(rgb, "full")
    traced = torch.jit.trace(converted, torch.zeros_like(yuv), check_trace=False)
    assert torch.equal(traced(yuv), converted(yuv).int_repr())


def test_a_picture_for_the_bpu_is_full_swing_in_its_own_type(pixels) -> None:
    picture = pixels.to(torch.uint8)
    yuv = bgr_to_yuv444(picture, channel_reversal=True)
    assert yuv.dtype == torch.uint8
    expected = reference(pixels[0, :, :, 0].numpy(), "full")
    assert np.abs(yuv[0, :, :, 0].numpy().astype(int) - expected).max() <= 1.5
    assert torch.equal(horizon.nn.BgrToYuv444()(picture.flip(1)), yuv)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (
            lambda x: horizon.rgb2yuv(x, "half"),
            "rgb2yuv: swing='half': expected 'studio' or 'full'",
        ),
        (lambda x: horizon.bgr2gray(x[:, :2]), r"bgr2gray: expected an image \[N, 3, .*\(1, 2, 4"),
        (lambda x: horizon.centered_yuv2rgb(x, mean=(1.0, 2.0)), "mean: expected one number or th"),
        (
            lambda x: horizon.centered_yuv2bgr(x, q_scale=0.0),
            "centered_yuv2bgr.*q_scale=0.0.*posit",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        call(torch.zeros(1, 3, 4, 4))
