"""Operations that half precision breaks: right in files, on frames unlike the example too.

float16 is rounded to after each operation, by ONNX's reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.nn import functional

from bevquant_export import export_float_onnx, export_qdq_onnx, open_onnx
from bevquant_export.runtime._session import reference_evaluator, rounded_session
from bevquant_int8sim import simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate

Between = Callable[[Tensor], Tensor]
HALF = 10


def squares_apart(x: Tensor) -> Tensor:
    x = x + 30
    squares = (x * x).sum(-1, keepdim=True)
    return (squares + squares.transpose(-1, -2) - 2 * x @ x.transpose(-1, -2)) @ x / 10


def variance(x: Tensor) -> Tensor:
    x = x + 50
    return (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2 + x - 50


def sampled(x: Tensor) -> Tensor:
    table = torch.arange(4 * 2048.0).reshape(1, 1, 4, 2048).remainder(7)
    places = x.tanh()[..., :2].reshape(x.shape[0], 1, -1, 2)
    found = functional.grid_sample(table.expand(len(x), -1, -1, -1), places, align_corners=False)
    return x + found.reshape(len(x), -1, 1)


def sines(x: Tensor) -> Tensor:
    angles = x[..., :1] * 20 * math.pi / 10000 ** (2 * (torch.arange(16) // 2) / 16)
    return torch.where(torch.arange(16) % 2 == 0, angles.sin(), angles.cos())


def summed(x: Tensor) -> Tensor:
    many = (x + 10)[..., None].expand(-1, -1, -1, 6000).reshape(len(x), -1)
    return x + many.mean(1)[:, None, None]


HAZARDS: dict[str, Between] = {
    "normalize": lambda x: functional.normalize(x, dim=-1),
    "layer norm": lambda x: functional.layer_norm(x, (16,), eps=1e-12),
    "rms norm": lambda x: functional.rms_norm(x, (16,), eps=1e-10),
    "group norm": lambda x: functional.group_norm(x.transpose(1, 2), 4, eps=1e-12).transpose(1, 2),
    "lost mask": lambda x: x.masked_fill(torch.arange(16) % 3 == 0, -1e9).sigmoid(),
    "sum": lambda x: x / (x.abs().sum(-1, keepdim=True) + 1e-9),
    "log1p": lambda x: torch.log1p(x.relu() * 1e-4) * 1e4,
    "expm1": lambda x: torch.expm1(x * 1e-4) * 1e4,
    "root": lambda x: (x.abs() + 1e-4) ** -0.5,
    "mean of many": summed,
    "variance": variance,
    "spread": lambda x: x / (x + 1000).var(-1, keepdim=True).clamp(min=1e-3),
    "distances": squares_apart,
    "sine": lambda x: torch.sin(x * 1000),
    "places": sines,
    "frustum": lambda x: torch.cat([x[..., :2].abs() * 500 * (x[..., 2:3].abs() * 20 + 1) / 60,
                                    x[..., 2:]], -1),
    "cells": lambda x: torch.remainder(((x + 4) * 100).floor() * 1001, 7.0),
    "centred": lambda x: (x + 1000) - (x + 1000).mean(1, keepdim=True),
    "one minus": lambda x: 1 - (1 - x * 1e-3),
    "small": lambda x: (x * 1e-6).sum(-1, keepdim=True) * 1e6 + x,
    "root of small": lambda x: (x.abs() * 1e-6).sqrt() * 1e3,
    "angle": lambda x: x * 50 - torch.floor((x * 50 + math.pi) / (2 * math.pi)) * 2 * math.pi,
    "sampled": sampled,
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, between: Between, *, layer: bool) -> None:
        super().__init__()
        self.a, self.between = nn.Linear(16, 16, bias=False), between
        self.b = nn.Linear(16, 8) if layer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


def frames() -> dict[str, Tensor]:
    torch.manual_seed(0)
    x, large = torch.randn(2, 6, 16), 3 * torch.randn(2, 6, 16)
    rows = x.clone()
    rows[:, 3:] = 0
    return {
        "example": x,
        "large": large,
        "rows": rows,
        "zeros": 0 * x,
        "seed": torch.randn(2, 6, 16),
    }


def off(path: Path, want: Between, given: dict[str, Tensor], step: float) -> dict[str, float]:
    """Frames on which the file is more than 2⁻⁶ and a step off, and by how much of the largest."""
    proto = onnx.load(path)
    (port,) = proto.graph.input
    half = port.type.tensor_type.elem_type == HALF
    rounded, found, largest = rounded_session(proto), {}, 0.0
    for name, x in given.items():
        x = x.half().float() if half else x
        wanted = want(x).detach().numpy().astype(np.float64)
        largest = max(largest, np.abs(wanted).max())
        made = list(open_onnx(path)({port.name: x}).values())
        if rounded is not None:
            feed = x.numpy().astype(np.float16 if half else np.float32)
            made += rounded.run(None, {port.name: feed})
        apart = max(np.abs(np.asarray(m, np.float64) - wanted).max() for m in made)
        if not apart <= 2.0**-6 * largest + step:
            found[name] = apart / largest
    return found


@pytest.mark.parametrize("name", HAZARDS)
def test_float_files(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    given = frames()
    net = Net(HAZARDS[name], layer=False).eval()
    path = tmp_path / "net.onnx"
    made = export_float_onnx(net, given["example"], path, half=True, frames=[given["large"]])
    assert any("float32" in note for note in made.notes)
    assert off(path, net, given, 1e-4) == {}


@pytest.mark.parametrize("name", HAZARDS)
def test_quantized_files(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    given = frames()
    x = given["example"]
    model = quantize_model(Net(HAZARDS[name], layer=True).eval(), example_inputs=x).model
    calibrate(model, [x, given["large"]])
    made = export_qdq_onnx(model, x, tmp_path / "net.onnx", "tensorrt11")
    integers = simulate(model, x)
    step = float(model.b._input_quantizer.amax) / 127 * float(model.b.weight.detach().abs().max())
    assert off(made.path, integers, given, 1.5 * step) == {}


def test_the_reference_computes_halves_as_onnxs_own() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((2, 9, 9)).astype(np.float16) for _ in range(2))
    nodes = [helper.make_node("MatMul", ["a", "b"], ["c"]), helper.make_node("Erf", ["c"], ["d"])]
    ports = [helper.make_tensor_value_info(n, HALF, (2, 9, 9)) for n in "abcd"]
    proto = helper.make_model(helper.make_graph(nodes, "g", ports[:2], ports[2:]))
    ours, theirs = (
        evaluator(proto).run(None, {"a": a, "b": b})
        for evaluator in (reference_evaluator, ReferenceEvaluator)
    )
    for got, want in zip(ours, theirs, strict=True):
        assert got.dtype == want.dtype == np.float16
        assert np.allclose(got, want, rtol=2.0**-9)
        assert np.mean(got == want) > 0.95


class Lookup(nn.Module):
    """Adds a row of a table, which has none for zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 8)
        self.register_buffer("table", torch.linspace(-1, 1, 160).view(10, 16))

    def forward(self, x: Tensor) -> Tensor:
        row = (1 / (x.abs().amax() + 0.1)).long()
        return self.b(self.a(x).sigmoid() + self.table[row])


def test_inputs_that_the_model_refuses_are_not_tried(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 16)
    model = quantize_model(Lookup().eval(), example_inputs=x).model
    calibrate(model, [x])
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "tensorrt11")
    (note,) = (note for note in file.notes if "not tried" in note)
    assert note.startswith("half precision is not tried on zeros: the model refuses it: IndexError")


def test_values_that_are_all_below_the_steps_of_halves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(6, 8)
    for parameter in net.parameters():
        parameter.data *= 1e-4
    model = quantize_model(net, example_inputs=x).model
    calibrate(model, [x])
    made = export_qdq_onnx(model, x.clone().requires_grad_(), tmp_path / "net.onnx", "tensorrt11")
    (got,) = open_onnx(made.path)(dict.fromkeys(made.inputs, x)).values()
    wanted = model(x).detach()
    assert wanted.abs().max() < 2.0**-12
    assert (got - wanted).abs().max() < 0.02 * wanted.abs().max()
