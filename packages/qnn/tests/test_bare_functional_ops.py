"""Modules of an author's that add or concatenate and hold nothing: ``Concat(dim)``, ``Add()``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bevquant_qnn as qnn
from bevquant_quantizers import TensorQuantizer, calibrate


class Join(nn.Module):
    def __init__(self, dim=1):
        super().__init__()
        self.dim = dim

    def forward(self, maps):
        return torch.cat(maps, self.dim)


class Sum(nn.Module):
    def forward(self, a, b):
        return a + b


class Neck(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(3, 8, 1),
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(16, 8, 1),
        )
        self.d, self.head = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)
        self.join, self.sum = Join(), Sum()

    def forward(self, x):
        y = self.c(self.join([self.a(x).relu(), self.b(x)]))
        return self.head(self.sum(self.d(y), y))


@pytest.mark.parametrize("observed", [True, False])
def test_they_join_what_the_layers_around_them_make(observed):
    model, x = Neck().eval(), torch.randn(1, 3, 8, 8)
    result = qnn.quantize_model(model, example_inputs=x if observed else None, inplace=True)
    added = [(q.path, q.kind) for q in result.quantized if q.path.count(".")]
    assert added == [
        ("join.quant_concat", "QuantConcat"), ("sum.residual_quantizer", "TensorQuantizer"),
    ]  # fmt: skip
    assert model.join.quant_concat._input_quantizer is model.c._input_quantizer
    assert model.sum.residual_quantizer is model.d._input_quantizer
    wanted = model(x)
    calibrate(model, [x])
    assert 0 < (model(x) - wanted).abs().max() < 0.05 * wanted.abs().max()
    paths = [name for name, _ in model.named_modules()]
    qnn.quantize_model(model, example_inputs=x, inplace=True)
    assert [name for name, _ in model.named_modules()] == paths


class Floats(nn.Module):
    """No layer is near what it joins."""

    def __init__(self):
        super().__init__()
        self.head, self.join = nn.Conv2d(3, 4, 1), Join()

    def forward(self, x, boxes):
        return self.head(x), self.join([boxes * 2, boxes]).exp()


class Shared(nn.Module):
    """One object joins maps of several ranges."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)
        self.join = Join()

    def forward(self, x):
        y = self.a(x)
        z = self.b(self.join([y, y.relu()]))
        return self.c(self.join([z, z.relu()]))


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        (Floats(), (torch.randn(1, 3, 4, 4), torch.randn(2, 4)), "neither fed nor read"),
        (Shared(), (torch.randn(1, 3, 4, 4),), "called several times"),
    ],
)
def test_those_of_no_layer_or_of_several_places_stay_float(model, inputs, reason):
    result = qnn.quantize_model(model.eval(), example_inputs=inputs)
    assert reason in next(note.reason for note in result.skipped if note.path == "join")
    assert not any(isinstance(m, TensorQuantizer) for m in model.join.modules())
