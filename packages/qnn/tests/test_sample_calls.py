"""Quantizers on what a forward samples; positions and weights stay float."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bevquant_qnn as qnn
from bevquant_graph import deformable_attention
from bevquant_quantizers import calibrate


class Warp(nn.Module):
    """Features sampled where another convolution says, between two convolutions."""

    def __init__(self, sample):
        super().__init__()
        self.features, self.flow = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 2, 1)
        self.head, self.sample = nn.Conv2d(4, 2, 1), sample

    def forward(self, x):
        grid = self.flow(x).permute(0, 2, 3, 1)
        return self.head(self.sample(self.features(x), grid))


SPELLINGS = {
    "positional": lambda y, grid: F.grid_sample(y, grid, "bilinear", "border", False),
    "named": lambda y, grid: F.grid_sample(input=y, grid=grid, align_corners=True),
    "torch's own": lambda y, grid: torch.grid_sampler(y, grid, 1, 2, True),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_sampled_tensor_is_quantized_and_its_positions_are_not(spelling):
    torch.manual_seed(0)
    net, x = Warp(SPELLINGS[spelling]).eval(), torch.randn(2, 3, 8, 8)
    result = qnn.quantize_model(net, example_inputs=x)
    assert [q.path for q in result.quantized] == ["features", "flow", "head", "sample_quantizer"]
    model = result.model
    calibrate(model, [x])
    seen = []
    model.sample_quantizer.register_forward_hook(lambda m, args, made: seen.append((*args, made)))
    got = model(x)
    ((given, made),) = seen
    want = SPELLINGS[spelling](made, model.flow(x).permute(0, 2, 3, 1))
    assert torch.equal(given, model.features(x))
    assert not torch.equal(given, made)
    assert torch.equal(got, model.head(want))


def test_settings_leave_samples_float_and_the_record_says_so():
    x, net = torch.randn(1, 3, 6, 6), Warp(SPELLINGS["positional"]).eval()
    config = qnn.QuantConfig(quantize_sample=False)
    assert [q.path for q in qnn.quantize_model(net, config, example_inputs=x).quantized] == [
        "features", "flow", "head",
    ]  # fmt: skip
    left = qnn.QuantConfig(exclude=("sample_quantizer",))
    skipped = qnn.quantize_model(net, left, example_inputs=x).skipped
    assert any(note.path == "sample_quantizer" and "excluded" in note.reason for note in skipped)
    layers = qnn.QuantConfig(exclude=("features", "flow", "head"))
    skipped = qnn.quantize_model(net, layers, example_inputs=x).skipped
    assert not any("sampl" in note.reason for note in skipped)  # nothing is quantized around it


def test_samples_away_from_quantized_layers_stay_float():
    class Far(Warp):
        def forward(self, x):
            return self.head(x.mean(1, keepdim=True) * self.features(x)), F.grid_sample(
                x.sigmoid(), self.flow(x).permute(0, 2, 3, 1), align_corners=False
            )

    result = qnn.quantize_model(Far(None).eval(), example_inputs=torch.randn(1, 3, 6, 6))
    assert "sample_quantizer" not in [q.path for q in result.quantized]
    assert any(
        note.reason.startswith("sampling (") and "neither fed nor read" in note.reason
        for note in result.skipped
    )


class Attention(nn.Module):
    """Deformable attention of one level with mmcv's arguments."""

    def __init__(self):
        super().__init__()
        self.value, self.offsets = nn.Linear(8, 8), nn.Linear(8, 2 * 3 * 2)
        self.weights, self.out = nn.Linear(8, 2 * 3), nn.Linear(8, 8)

    def forward(self, queries, memory):
        batch, count, _ = queries.shape
        value = self.value(memory).view(batch, -1, 2, 4)
        places = self.offsets(queries).view(batch, count, 2, 1, 3, 2).sigmoid()
        weights = self.weights(queries).view(batch, count, 2, 3).softmax(-1).unsqueeze(3)
        shapes, starts = torch.tensor([[4, 5]]), torch.tensor([0])
        return self.out(deformable_attention(value, shapes, starts, places, weights))


def test_values_of_deformable_attention_are_quantized_and_trained():
    torch.manual_seed(1)
    net, given = Attention().eval(), (torch.randn(2, 6, 8), torch.randn(2, 20, 8))
    result = qnn.quantize_model(net, example_inputs=given)
    assert "sample_quantizer" in [q.path for q in result.quantized]
    model = result.model
    calibrate(model, [given])
    with torch.no_grad():
        want, made = net(*given), model(*given)
    assert float((made - want).var() / want.var()) < 0.01
    model(*given).square().sum().backward()
    for layer in (model.value, model.offsets, model.weights, model.out):
        assert bool(layer.weight.grad.abs().sum() > 0)


def test_the_gradient_of_deformable_attention_is_that_of_differences():
    torch.manual_seed(2)
    value = torch.randn(1, 6 + 2, 2, 3, dtype=torch.float64, requires_grad=True)
    shapes, starts = torch.tensor([[2, 3], [1, 2]]), torch.tensor([0, 6])
    places = (torch.rand(1, 4, 2, 2, 2, 2, dtype=torch.float64) * 1.4 - 0.2).requires_grad_()
    weights = torch.rand(1, 4, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(
        lambda v, p, w: deformable_attention(v, shapes, starts, p, w), (value, places, weights)
    )
