"""The estimate from gradients beside the measurement that it stands for."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from bevquant_qnn import (
    SensitivityTable,
    estimate_sensitivity,
    precision_groups,
    quantize_model,
    sensitivity,
)
from bevquant_quantizers import calibrate

pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")


def calibrated(net, *batches, call=lambda model, batch: model(batch)):
    model = quantize_model(net.eval(), example_inputs=batches[0]).model
    calibrate(model, list(batches), forward=call)
    return model


def differences(model, batches, **options):
    """Estimated minus measured, dB, of every group and precision."""
    measured = sensitivity(model, batches, without=False, **options)
    estimated = estimate_sensitivity(model, batches, **options)
    assert (estimated.estimated, measured.estimated) == (True, False)
    assert [row.modules for row in estimated] == [row.modules for row in measured]
    assert [row.operations for row in estimated] == [row.operations for row in measured]
    assert estimated.float_score == measured.float_score
    return {
        (row.name, name): other.alone[name] - score
        for row, other in zip(measured, estimated, strict=True)
        for name, score in row.alone.items()
    }


class InPlace(nn.Module):
    """ReLUs in place, a sum whose tensor a convolution reads too, a concatenation."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.low = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.head = nn.Conv2d(16, 4, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.relu(self.stem(x))
        y = self.relu(self.second(self.relu(self.first(x))) + x)
        return self.head(torch.cat([y, self.up(self.relu(self.low(y)))], 1))


def test_dense_layers_lie_within_decibels_of_their_measurement():
    torch.manual_seed(0)
    images = [torch.randn(4, 3, 32, 32) for _ in range(2)]
    model = calibrated(InPlace(), *images)
    found = differences(model, images, precisions=("int4", "int8"))
    assert len(found) == 2 * len(precision_groups(model))
    assert max(map(abs, found.values())) < 1.5


def test_sparse_layers_lie_within_decibels_of_their_measurement(sparse_nets):
    torch.manual_seed(0)
    coordinates = (torch.rand(1, 16, 16, 17) < 0.2).nonzero().int()
    batch = (torch.randn(len(coordinates), 5), coordinates, 1)
    call = lambda model, batch: model(*batch)  # noqa: E731
    model = calibrated(sparse_nets.SparseEncoder(), batch, call=call)
    found = differences(model, [batch], forward=call).values()
    assert max(map(abs, found)) < 6  # of the 40 dB between them; maps of a few cells
    assert sum(map(abs, found)) / len(found) < 2.5


def test_tokens_and_lines_lie_within_decibels_of_their_measurement():
    torch.manual_seed(0)
    tokens = torch.randn(2, 64, 16)
    model = calibrated(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), tokens)
    found = differences(model, [tokens])
    line = torch.randn(2, 4, 300)
    convs = nn.Conv1d(4, 8, 5), nn.ReLU(inplace=True), nn.Conv1d(8, 4, 1)
    found |= differences(calibrated(nn.Sequential(*convs), line), [line])
    volume = torch.randn(1, 2, 16, 16, 16)
    convs = nn.Conv3d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv3d(4, 4, 1)
    found |= differences(calibrated(nn.Sequential(*convs), volume), [volume])
    assert max(map(abs, found.values())) < 1.5


class Pieces(nn.Module):
    """One layer whose gradient is cut, one that is called twice, once behind the cut."""

    def __init__(self):
        super().__init__()
        self.cut, self.twice, self.last = (nn.Conv2d(4, 4, 1) for _ in range(3))

    def forward(self, x):
        y = self.twice(self.cut(x).relu()).detach()
        return self.last(self.twice(y.relu()))


def test_what_no_gradient_reaches_is_measured():
    torch.manual_seed(0)
    images = [torch.randn(2, 4, 16, 16)]
    model = calibrated(Pieces(), *images)
    found = differences(model, images)
    assert found["cut", "int8"] == found["twice", "int8"] == 0
    assert 0 < abs(found["last", "int8"]) < 1.5
    beside = estimate_sensitivity(model, images, outputs=["cut"])
    assert beside["last"].alone["int8"] == beside.float_score == 144.5


class Frozen(nn.Module):
    """A stem without gradients, as frozen stages and checkpoints run."""

    def __init__(self):
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        with torch.no_grad():
            x = self.stem(x).relu_()
        return self.last(x)


def test_what_runs_without_gradients_and_what_is_small_is_measured():
    torch.manual_seed(0)
    images = [torch.randn(2, 3, 16, 16)]
    found = differences(calibrated(Frozen(), *images), images)
    assert found["stem", "int8"] == 0
    assert 0 < abs(found["last", "int8"]) < 1.5
    few = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    found = differences(calibrated(few, *images), images)
    assert found["3", "int8"] == 0


def test_gradients_without_a_value_are_no_estimate():
    class Roots(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return (self.layer(x) * (x[:, :1] > 0)).square().sqrt()

    images = [torch.randn(2, 3, 8, 8)]
    model = calibrated(Roots(), *images)
    assert set(differences(model, images).values()) == {0}


def test_more_probes_come_closer():
    torch.manual_seed(0)
    image = torch.randn(1, 3, 16, 16)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 50)
    model = calibrated(nn.Sequential(*layers), image)
    measured = sensitivity(model, [image], without=False)["4"].alone["int8"]
    found = estimate_sensitivity(model, [image], probes=200)["4"].alone["int8"]
    assert abs(found - measured) < 1.5  # one place: each probe's square by itself
    with pytest.raises(ValueError, match="probes"):
        estimate_sensitivity(model, [image], probes=0)


def test_the_model_is_left_as_it_was():
    images = [torch.randn(2, 3, 16, 16)]
    model = calibrated(InPlace(), *images)
    model.train()
    model.stem.weight.grad = torch.ones_like(model.stem.weight)
    before, text = copy.deepcopy(model.state_dict()), repr(model)
    first, again = (estimate_sensitivity(model, images) for _ in range(2))
    assert first == again
    assert repr(model) == text
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert bool((model.stem.weight.grad == 1).all())
    assert model.head.weight.grad is None
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    for p in model.parameters():
        p.requires_grad_(False)
    with torch.no_grad():
        assert estimate_sensitivity(model, images) == first


def test_an_estimate_stays_one_in_json(tmp_path):
    images = [torch.randn(2, 3, 16, 16)]
    model = calibrated(InPlace(), *images)
    table = estimate_sensitivity(model, images)
    table.save(tmp_path / "table.json")
    assert SensitivityTable.load(tmp_path / "table.json") == table
    assert str(table).startswith("sqnr (estimated): float 144.5, 1 batches")
    assert "estimated" not in sensitivity(model, images, without=False).to_json()


def test_errors():
    images = [torch.randn(2, 3, 16, 16)]
    model = calibrated(InPlace(), *images)
    with pytest.raises(ValueError, match="no batches"):
        estimate_sensitivity(model, [])
    with pytest.raises(ValueError, match="NaN or infinite"):
        estimate_sensitivity(model, [images[0] * math.inf])
    model.head.weird = nn.Identity()
    with pytest.raises(ValueError, match=r"does not call head\.weird"):
        estimate_sensitivity(model, images, outputs=["head.weird"])
