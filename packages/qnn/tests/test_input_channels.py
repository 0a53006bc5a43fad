"""Ranges by input channel: exact in float, less noise, kept by every hand-over, or named."""

import copy

import pytest
import torch
from torch import nn

from bevquant_fusion import fuse_model
from bevquant_qnn import (
    QuantConv2d,
    QuantConvTranspose2d,
    QuantLinear,
    compare_layers,
    freeze,
    keep_within_ranges,
    learn_ranges,
    quantize_model,
    round_weights,
)
from bevquant_quantizers import calibrate, load_ranges, quantization_disabled, save_ranges

# Extent of x, y, z, intensity, and the offsets of points to their pillar.
UNITS = torch.tensor([140.0, 80, 4, 255, 0.4, 0.4, 0.4, 0.32])


def points(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    start = torch.full((8,), 0.5)
    start[3] = 0
    return (torch.rand(*shape, 8, generator=generator) - start) * UNITS


def maps(seed):
    return points(seed, 2, 12, 12).permute(0, 3, 1, 2).contiguous()


class Pillars(nn.Module):
    """A PointPillars encoder, with the offsets computed in the forward."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        offsets = x[..., :3] - x[..., :3].mean(1, keepdim=True)
        x = torch.cat([x[..., :2], offsets[..., :2] / 350, x[..., 4:]], -1)
        return self.last(self.first(x).relu().amax(1))


class Mixed(nn.Module):
    """Units that two quantized layers make."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 4), nn.Linear(8, 4)
        self.first = nn.Linear(8, 16)
        self.wide.weight.data *= 300

    def forward(self, x):
        return self.first(torch.cat([self.wide(x), self.narrow(x)], -1))


def dense(first, frames):
    """`first`, a layer for maps of mixed units, and one more."""
    net = nn.Sequential(first, nn.ReLU(), nn.Conv2d(16, 4, 1)).eval()
    return net, frames


def nets():
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    linear[0].weight.data /= UNITS
    yield pytest.param(linear.eval(), [points(i, 60, 20) for i in range(2)], id="linear")
    pillars = Pillars()
    pillars.first.weight.data /= torch.tensor([140, 80, 0.4, 0.23, 0.4, 0.4, 0.4, 0.32])
    yield pytest.param(pillars.eval(), [points(i, 60, 20) for i in range(2)], id="pillars")
    along = UNITS[:, None, None]
    for groups in (1, 2):
        first = nn.Conv2d(8, 16, 3, padding=1, groups=groups)
        first.weight.data.view(groups, -1, 8 // groups, 9).div_(UNITS.view(groups, 1, -1, 1))
        yield pytest.param(*dense(first, [maps(i) for i in range(2)]), id=f"conv{groups}")
        up = nn.ConvTranspose2d(8, 16, 2, stride=2, groups=groups)
        up.weight.data /= along[..., None]
        yield pytest.param(*dense(up, [maps(i) for i in range(2)]), id=f"transposed{groups}")


def quantized(net, frame):
    return quantize_model(copy.deepcopy(net), example_inputs=frame).model


def sqnr(net, model, frame):
    with torch.no_grad():
        clean = net(frame)
        return float(10 * (clean.square().sum() / (clean - model(frame)).square().sum()).log10())


def factors_of(model):
    found = (getattr(m, "_input_quantizer", None) for m in model.modules())
    return [q.channel_factors for q in found if q is not None and q.channel_factors is not None]


@pytest.mark.parametrize(("net", "frames"), list(nets()))
def test_each_channel_has_its_own_range(net, frames):
    model = quantized(net, frames[0])
    report = calibrate(model, frames[:1])
    assert factors_of(model)
    for factors in factors_of(model):
        assert bool((factors.frexp().mantissa == 0.5).all())  # powers of two
    assert report.poor == ()
    assert any(f.kind == "channels" for f in report.findings)
    assert sqnr(net, model, frames[1]) > 35
    with quantization_disabled(model):
        assert torch.equal(model(frames[1]), net(frames[1]))


@pytest.mark.parametrize(("net", "frames"), list(nets()))
def test_every_hand_over_keeps_them(net, frames, tmp_path):
    model = quantized(net, frames[0])
    calibrate(model, frames[:1])
    wanted = model(frames[1])
    loaded = quantized(net, frames[0])
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded(frames[1]), wanted)
    save_ranges(model, tmp_path / "ranges.json")
    ranged = quantized(net, frames[0])
    load_ranges(ranged, tmp_path / "ranges.json")
    assert torch.equal(ranged(frames[1]), wanted)
    twice = quantize_model(copy.deepcopy(model), example_inputs=frames[0]).model
    assert torch.equal(twice(frames[1]), wanted)
    calibrate(twice, frames[:1])
    assert torch.equal(twice(frames[1]), wanted)
    keep_within_ranges(twice)
    assert torch.equal(twice(frames[1]), wanted)
    round_weights(twice, frames[:1])
    assert sqnr(net, twice, frames[1]) > 35


def test_training_learns_through_them():
    net, frames = next(nets()).values
    model = quantized(net, frames[0])
    calibrate(model, frames[:1])
    before = model[0].weight.detach().clone()
    learn_ranges(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    model(frames[0]).square().mean().backward()
    assert float(model[0]._input_quantizer._amax.grad.abs()) > 0
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    freeze(model)
    assert sqnr(net, model, frames[1]) > 35


def test_saturated_values_are_counted_with_the_factors():
    net, frames = next(nets()).values
    model = quantized(net, frames[0])
    calibrate(model, frames[:1])
    far = frames[0].clone()
    far[..., 4:] *= 3  # a third of the four offsets stays in its range
    row = compare_layers(net, model, [far])[0]
    assert 0.25 < row.saturated < 0.4


def test_alike_channels_keep_one_range():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    image = torch.rand(1, 3, 16, 16) * torch.tensor([1.0, 2.0, 0.5])[:, None, None]
    model = quantized(net, image)
    report = calibrate(model, [image])
    assert factors_of(model) == []
    assert report.findings == ()


def test_weights_that_do_not_make_up_for_the_units_keep_one_range():
    """The wide channels decide the result: factors would only add noise of the weight."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    frame = points(0, 60, 20)
    model = quantized(net, frame)
    report = calibrate(model, [frame])
    assert factors_of(model) == []
    assert report.poor == ()
    (note,) = (f for f in report.findings if f.kind == "channels")
    assert note.evidence.startswith(
        "channels 4 (0.199), 5 (0.199), 6 (0.199), 7 (0.159) of 8: always 0"
    )
    assert sqnr(net, model, frame) > 35


def test_units_that_quantized_layers_make_are_named():
    torch.manual_seed(0)
    net = Mixed().eval()
    net.first.weight.data[:, :4] /= 300
    frame = torch.randn(200, 8)
    model = quantized(net, frame)
    report = calibrate(model, [frame])
    assert factors_of(model) == []
    (poor,) = report.poor
    assert poor.tensor == "first._input_quantizer"
    assert "always 0" in poor.evidence
    assert "float operations make" in poor.remedy


class Anchors(nn.Module):
    """Features of a layer beside reference points [m], timestamps [s] and scores."""

    def __init__(self, kind):
        super().__init__()
        layer, self.dim = {"linear": (nn.Linear, -1), "conv": (nn.Conv2d, 1)}[kind]
        size = () if kind == "linear" else (1,)
        self.features, self.first = layer(8, 8, *size), layer(13, 16, *size)
        self.second, self.last = layer(13, 4, *size), layer(20, 4, *size)
        self.units = torch.tensor([*[1.0] * 8, 50.0, 50.0, 3.0, 5e3, 0.5])
        for reader in (self.first, self.second):
            reader.weight.data /= self.units.view(-1, *size, *size)

    def forward(self, x, places):
        joined = torch.cat([self.features(x), places], self.dim)
        return self.last(torch.cat([self.first(joined), self.second(joined)], self.dim).relu())


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_positions_beside_features_have_ranges_of_their_own(kind):
    torch.manual_seed(0)
    net = Anchors(kind).eval()

    def frame():
        rows = torch.randn(2, 60, 8), torch.rand(2, 60, 5) * net.units[8:]
        if kind == "linear":
            return rows
        return tuple(r.transpose(1, 2).unflatten(2, (6, 10)) for r in rows)

    frames = [frame() for _ in range(3)]
    model = quantized(net, frames[0])
    report = calibrate(model, frames[:2])
    assert report.poor == ()
    assert len(factors_of(model)) == 3  # of the concatenation and both readers, one quantizer
    with torch.no_grad():
        want = net(*frames[2])
        noise = (model(*frames[2]) - want).var() / want.var()
        moved = net(frames[2][0], frames[2][1] * 1.01) - want
    assert float(noise) < 2e-3
    assert float(moved.abs().max()) > 0  # the positions do matter


def test_readers_without_a_weight_are_named():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.pool = nn.Conv2d(8, 16, 1), nn.AvgPool2d(2)
            self.last = nn.Conv2d(8, 16, 1)

        def forward(self, x):
            return self.first(x)[..., :6, :6] + self.last(self.pool(x))

    torch.manual_seed(0)
    net = Net().eval()
    for layer in (net.first, net.last):
        layer.weight.data /= UNITS[:, None, None]
    model = quantized(net, maps(0))
    report = calibrate(model, [maps(0)])
    assert factors_of(model) == []
    assert any("pool cannot take ranges by channel" in p.remedy for p in report.poor)


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (QuantLinear(3, 4), torch.randn(5, 6, 3)),
        (QuantConv2d(4, 6, 3, groups=2), torch.randn(4, 8, 8)),
        (QuantConvTranspose2d(4, 6, 2, groups=2), torch.randn(2, 4, 8, 8)),
    ],
)
def test_views_by_channel(layer, x):
    channel = -1 if layer.weight.dim() == 2 else -3
    seen = layer.channels_of(x)
    moved = x.movedim(channel, -1)
    assert torch.equal(seen.movedim(1, -1).reshape(-1), moved.reshape(-1))
    grouped = layer.weight_by_channel()
    assert grouped.shape[0] * grouped.shape[2] == x.shape[channel]
    assert grouped.numel() == layer.weight.numel()


@pytest.mark.parametrize("kind", ["linear", "conv", "transposed"])
def test_a_batch_norm_is_folded_behind_them(kind):
    """The ranges are those of the weight divided by the factors, whatever the sign of the norm."""
    torch.manual_seed(0)
    first = {
        "linear": nn.Linear(8, 16),
        "conv": nn.Conv2d(8, 16, 3),
        "transposed": nn.ConvTranspose2d(8, 16, 2, 2, groups=2),
    }[kind]
    shape = [1, 8] if kind == "linear" else [1, 8, 1, 1]
    first.weight.data /= UNITS.reshape([8, 1, 1, 1] if kind == "transposed" else shape)
    norm = nn.BatchNorm1d(16) if kind == "linear" else nn.BatchNorm2d(16)
    net = nn.Sequential(first, norm, nn.ReLU()).eval()
    norm.weight.data.uniform_(-2, 2)
    norm.running_var.uniform_(0.5, 2)
    frame = points(0, 600) if kind == "linear" else maps(0)
    model = quantize_model(net, example_inputs=frame).model
    calibrate(model, [frame])
    assert factors_of(model)
    model[0].weight_quantizer.narrow_range = False  # a negative factor then clamps to the range
    made = fuse_model(model, frame)
    assert len(made.fused) == 1
    assert sqnr(model, made.model, frame) > 90
