"""A comparison beside runs that go on anyway takes what their layers return."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from bevquant_int8sim import LayerComparison, simulate
from bevquant_int8sim.model import _reference
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate


class Keeps(nn.Conv2d):
    """Returns something else than the convolution that the model goes on with."""

    def forward(self, x):
        self.made = super().forward(x)
        return x


class Halved(nn.ReLU):
    """Returns something else than the ReLU that the model goes on with."""

    def forward(self, x):
        self.made = super().forward(x)
        return x / 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.again = nn.Conv2d(8, 8, 3, padding=1)
        self.shared = nn.Conv2d(8, 8, 1)
        self.alias = self.shared
        self.keeps = Keeps(8, 8, 1)
        self.relu = nn.ReLU(inplace=True)
        self.halved = Halved()
        self.pool = nn.MaxPool2d(3, 1, 1)
        self.unused = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = self.relu(self.first(x))
        y = self.relu(self.again(x))
        y = self.relu(self.again(y)) + self.pool(x)
        self.halved(y)
        y = torch.cat([self.halved.made, y], 1)[:, 4:12]
        y = self.shared(self.relu(self.alias(y)))
        self.keeps(y)
        return self.keeps.made * 2


def image(seed=0):
    return torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(3)
    net = Net().eval()
    quantized = quantize_model(net, example_inputs=image()).model
    calibrate(quantized, [image()])
    return net, simulate(quantized, image())


def results(model, layers, batch):
    """What each call of the layers returns, copied before the model writes over it."""
    found, calls, hooks = {}, Counter(), []
    for path, module in model.named_modules():
        if path in layers:

            def note(_, __, made, path=path):
                found[path, calls[path]] = made.clone()
                calls[path] += 1

            hooks.append(module.register_forward_hook(note))
    with torch.no_grad():
        model(batch)
    for hook in hooks:
        hook.remove()
    return lambda path, number: found.get((path, number))


def counted(monkeypatch):
    """What graphs compute from now on, by path; the forced run apart."""
    count = Counter()
    computed = _reference.GraphRun._computed

    def noted(self, node, beside):
        taken = self._returned is not None and node in self._calls
        name = str(node.target)
        known = any(kind in name for kind in ("conv", "relu", "max_pool"))
        if known and not self.channels_last and not taken:
            count[self.graph.path(node)] += 1
        return computed(self, node, beside)

    monkeypatch.setattr(_reference.GraphRun, "_computed", noted)
    return count


def test_layers_taken_from_runs_beside_give_the_same_record(models, monkeypatch):
    net, integer = models
    batch = image(1)
    apart = LayerComparison(net, integer)
    wanted = apart.measure(batch)

    beside = LayerComparison(net, integer)
    given = [results(m, beside.layers, batch) for m in (net, integer.source.graph.model)]
    count = counted(monkeypatch)
    got = beside.measure(batch, given)

    assert got.keys() == wanted.keys()
    assert all(np.array_equal(got[name], wanted[name], equal_nan=True) for name in wanted)
    # Of a layer with two names it cannot be told which call is which; what one of the author's
    # classes returns need not be its convolution, a child of it in the calibrated model alone.
    assert set(count) == {"shared", "alias", "keeps.quant_conv", "halved"}


def test_whose_calls_are_told_apart(models):
    net, integer = models
    layers = LayerComparison(net, integer).layers
    assert {"first", "again", "first._input_quantizer", "again._weight_quantizer"} <= layers
    assert {"relu", "pool", "quant_concat"} <= layers
    assert not layers & {"shared", "alias", "keeps", "halved", "unused", ""}


def test_a_layer_that_is_not_called_beside_is_computed(models):
    net, integer = models
    batch = image(2)
    comparison = LayerComparison(net, integer)
    wanted, asked = comparison.measure(batch), set()

    def nothing(path, number):
        asked.add((path, number))

    got = comparison.measure(batch, [nothing, None])
    assert {("first", 0), ("again", 0), ("again", 1)} <= asked
    assert all(np.array_equal(got[name], wanted[name], equal_nan=True) for name in wanted)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Conv2d(3, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2)
        self.behind = nn.Linear(8, 4)

    def forward(self, x):
        x = self.before(x).flatten(2).permute(2, 0, 1)
        return self.behind(self.attention(x, x, x, need_weights=False)[0])


def test_nothing_is_taken_behind_attention():
    """Outside of a graph torch computes it fused, and what follows has other last bits."""
    net = Attends().eval()
    quantized = quantize_model(net, example_inputs=image()).model
    calibrate(quantized, [image()])
    layers = LayerComparison(net, simulate(quantized, image())).layers
    assert {"before", "before._input_quantizer"} <= layers
    weights = {path for path in layers if path.endswith("_weight_quantizer")}  # read no values
    assert not [p for p in layers - weights if p.startswith(("attention", "behind"))]
