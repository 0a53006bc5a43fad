"""simulate() on models that sample: in integers, against fake quantization and a loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_graph import deformable_attention
from bevquant_int8sim import IntegerModel, compare, int8_grid_sample, simulate
from bevquant_qnn import QuantConfig, quantize_model
from bevquant_quantizers import calibrate


class Warp(nn.Module):
    def __init__(self, head=True, **settings):
        super().__init__()
        self.features, self.flow = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 2, 1)
        self.head, self.settings = nn.Conv2d(6, 4, 1) if head else nn.Identity(), settings

    def forward(self, x):
        grid = 2 * self.flow(x).permute(0, 2, 3, 1)
        return self.head(F.grid_sample(self.features(x).relu(), grid, **self.settings).relu())


class Volume(nn.Module):
    """Points of a camera's frustum sampled in a volume."""

    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Conv3d(3, 6, 1), nn.Conv3d(6, 4, 1)
        self.register_buffer("grid", torch.rand(1, 2, 3, 4, 3) * 2.4 - 1.2)

    def forward(self, x):
        y = self.features(x[:, :, None].repeat(1, 1, 5, 1, 1))
        return self.head(
            F.grid_sample(y, self.grid.expand(len(x), -1, -1, -1, -1), align_corners=False)
        )


class Attention(nn.Module):
    """Two levels, whose sizes are those of the maps."""

    def __init__(self):
        super().__init__()
        self.value, self.query = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 3, 2, 1)
        self.offsets, self.weights = nn.Linear(8, 2 * 2 * 3 * 2), nn.Linear(8, 2 * 6)
        self.out = nn.Linear(8, 5)
        self.register_buffer("places", torch.rand(24, 2) * 1.2 - 0.1)

    def forward(self, x):
        maps = [self.value(x), self.value(F.max_pool2d(x, 2))]
        sizes = [m.shape[2:] for m in maps]
        rows = torch.cat([m.flatten(2).transpose(1, 2) for m in maps], 1)
        shapes = torch.as_tensor([(h, w) for h, w in sizes])
        starts = torch.cat([shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]])
        query = self.query(x).flatten(2).transpose(1, 2).relu()
        batch, count, _ = query.shape
        offsets = self.offsets(query).view(batch, count, 2, 2, 3, 2) / 8
        places = self.places[:, None, None, None] + offsets
        weights = self.weights(query).view(batch, count, 2, 6).softmax(-1)
        weights = weights.view(batch, count, 2, 2, 3)
        value = rows.view(batch, -1, 2, 4)
        return self.out(deformable_attention(value, shapes, starts, places, weights))


NETS = {
    "bilinear, zeros": lambda: Warp(align_corners=False),
    "bilinear, border": lambda: Warp(align_corners=True, padding_mode="border"),
    "bilinear, reflection": lambda: Warp(align_corners=False, padding_mode="reflection"),
    "nearest": lambda: Warp(mode="nearest", align_corners=False),
    "read as floats": lambda: Warp(head=False, align_corners=False),
    "volume": Volume,
    "attention": Attention,
}


def images(seed):
    return torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(seed))


def calibrated(name, config=None):
    torch.manual_seed(3)
    net = NETS[name]().eval()
    model = quantize_model(net, config, example_inputs=images(0)).model
    calibrate(model, [images(0), images(1)])
    return net, model


@pytest.mark.parametrize("name", NETS)
def test_samples_are_integers_and_agree_with_fake_quantization(name, tmp_path):
    net, model = calibrated(name)
    integer = simulate(model, images(0))
    (step,) = [s for s in integer.program.steps if s.op in ("grid_sample", "deformable_attention")]
    form = integer.program.values[step.args[0].name].form
    assert form.bits == 8
    assert not any("sampl" in f.what or "attention" in f.what for f in integer.float_fallbacks)
    table = compare(net, model, [images(2), images(3)], verify=True)
    assert not table.wrong
    (row,) = [r for r in table.rows if r.op.startswith(step.op)]
    assert (row.fake_sqnr_db or 0) - (row.integer_sqnr_db or 0) < 0.5
    integer.save(tmp_path / "net")
    again = IntegerModel.load(tmp_path / "net")
    assert torch.equal(again(images(4)), integer(images(4)))


@pytest.mark.parametrize("rounding", ["half_even", "half_up"])
@pytest.mark.parametrize("arithmetic", ["float64", "fixed_point"])
def test_a_models_samples_are_those_of_the_kernel(rounding, arithmetic):
    _, model = calibrated("bilinear, border")
    integer = simulate(model, images(0), rounding=rounding, arithmetic=arithmetic)
    taken = {}
    integer.run(images(5), observe=lambda step, *values: taken.update({step.op: (step, *values)}))
    step, (x, grid), (got,) = taken["grid_sample"]
    assert x.dtype == torch.int8
    assert grid.dtype == torch.float32
    read = {n: integer.program.values[n].form.scale for n in (step.args[0].name, step.outputs[0])}
    scale_x, scale_y = read.values()
    want = int8_grid_sample(
        x, grid, "bilinear", "border", True, multiplier=scale_x / scale_y, rounding=rounding,
        arithmetic=arithmetic,
    )  # fmt: skip
    assert torch.equal(got, want.clamp(min=0))  # with the ReLU behind it


class Projected(nn.Module):
    """Features at points that are divided by their depth."""

    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x, points):
        grid = points[..., :2] / points[..., 2:]
        return self.head(F.grid_sample(self.features(x), grid, align_corners=False))


def test_a_position_that_is_no_number_is_refused_with_its_module():
    net = nn.ModuleDict({"lift": Projected()})

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = net

        def forward(self, x, points):
            return self.parts["lift"](x, points)

    given = images(0), torch.rand(2, 4, 5, 3) + 0.5
    model = quantize_model(Whole().eval(), example_inputs=given).model
    calibrate(model, [given])
    integer = simulate(model, given)
    assert integer(*given).isfinite().all()
    given[1][1, 2, 3] = 0
    with pytest.raises(
        ValueError, match=r"^parts\.lift: grid \(1, 2, 3, 0\) is nan: expected finite"
    ):
        integer(*given)


def test_bicubic_samples_stay_float_with_the_reason():
    torch.manual_seed(3)
    net = Warp(mode="bicubic", align_corners=False).eval()
    model = quantize_model(net, example_inputs=images(0)).model
    calibrate(model, [images(0)])
    floats = {f.what: f.reason for f in simulate(model, images(0)).float_fallbacks}
    assert floats["grid_sampler"] == "grid_sampler has no integer form"
    _, wide = calibrated("bilinear, zeros", QuantConfig(num_bits=16, weight_bits=8))
    floats = {f.what: f.reason for f in simulate(wide, images(0)).float_fallbacks}
    assert floats["grid_sampler"] == "it samples int8, and its values have 16 bits"
    bare = quantize_model(net, QuantConfig(quantize_sample=False), example_inputs=images(0)).model
    calibrate(bare, [images(0)])
    net.settings["mode"] = bare.settings["mode"] = "bilinear"
    floats = {f.what: f.reason for f in simulate(bare, images(0)).float_fallbacks}
    assert floats["grid_sampler"] == "grid_sampler reads no int8 values"
