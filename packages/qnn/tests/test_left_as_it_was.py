"""Frames and models stay as they were; FloatFunctional is the operation that it wraps."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.ao.nn.quantized import FloatFunctional, FXFloatFunctional

from bevquant_qnn import (
    freeze,
    learn_ranges,
    quantize_model,
    round_weights,
    sensitivity,
    track_ranges,
)
from bevquant_quantizers import calibrate, load_ranges, save_ranges


class Head(nn.Module):
    """In OpenPCDet's manner: what it makes goes into the dict that it gets."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.calls = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), 0

    def forward(self, batch):
        self.calls += 1
        batch["image"] = self.a(batch["image"].mul_(2)).relu()
        batch["found"].append(self.b(batch["image"]))
        return batch["found"][0]


class Asks(nn.Module):
    """Is not followed as a whole: its child is, on what it got."""

    def __init__(self):
        super().__init__()
        self.head = Head()

    def forward(self, batch):
        return self.head(batch) if batch["image"].sum() < 1e9 else batch["image"]


def frame():
    return {"batch": {"image": torch.ones(1, 3, 6, 6), "found": []}}


@pytest.mark.parametrize("net", [Head, Asks])
def test_frames_and_models_stay_as_they_were(net):
    model, given = net().eval(), frame()
    head = next(m for m in model.modules() if isinstance(m, Head))
    result = quantize_model(model, example_inputs=given, inplace=True)
    assert [item.path.rpartition(".")[2] for item in result.quantized] == ["a", "b"]
    calibrate(model, [given])
    sensitivity(model, [given])
    round_weights(model, [given])
    assert head.calls == 0
    assert repr(given) == repr(frame())


def float_functional(kind, name):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.f = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), kind()
            self.c = nn.Conv2d(8, 4, 1)

        def forward(self, x):
            a, b = self.a(x), self.b(x)
            if name == "cat":
                return self.c(self.f.cat([a, b], dim=2))
            return self.c(getattr(self.f, name)(a, b))

    return Net().eval()


@pytest.mark.parametrize("kind", [FloatFunctional, FXFloatFunctional])
@pytest.mark.parametrize(("name", "added"), [("add", 1), ("add_relu", 1), ("cat", 1), ("mul", 0)])
def test_float_functional_is_quantized_as_what_it_computes(kind, name, added):
    x = torch.randn(1, 3, 8, 8)
    result = quantize_model(float_functional(kind, name), example_inputs=x)
    assert len(result.quantized) == 3 + added
    assert ["mul" in note.reason for note in result.skipped] == [True] * (name == "mul")


def test_torchs_integer_functional_is_refused():
    net = nn.Sequential(nn.Conv2d(3, 4, 3))
    net.f = torch.ao.nn.quantized.QFunctional()
    with pytest.raises(ValueError, match=r"f \(QFunctional.*quantized by torch already"):
        quantize_model(net, example_inputs=torch.ones(1, 3, 8, 8))


@pytest.mark.parametrize("how", ["plain", "learn", "track", "load"])
def test_ranges_made_in_inference_mode_train(how, tmp_path):
    x = torch.randn(2, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    with torch.inference_mode():
        model = quantize_model(net, example_inputs=x).model
        calibrate(model, [x])
        save_ranges(model, tmp_path / "ranges.json")
        load_ranges(model, tmp_path / "ranges.json")
        learned = learn_ranges(model) if how == "learn" else []
        if how == "load":
            model.load_state_dict(model.state_dict())
            freeze(model)
    if how == "track":
        track_ranges(model, 2)
    assert not any(t.is_inference() for t in (*model.parameters(), *model.buffers()))
    model.train()
    for _ in range(2):
        model(x).square().mean().backward()
    assert all(p.grad is not None for p in (*model.parameters(), *learned))


def test_two_threads_calibrate_and_quantize_one_model():
    x = torch.randn(2, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    errors = []

    def work():
        try:
            quantize_model(net, example_inputs=x, inplace=True)
            calibrate(net, [x])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    once = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    once.load_state_dict({k: v for k, v in net.state_dict().items() if "amax" not in k})
    once = quantize_model(once, example_inputs=x).model
    calibrate(once, [x])
    for name, value in once.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name
