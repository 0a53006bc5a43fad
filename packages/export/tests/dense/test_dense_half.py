"""Half precision is decided by ranges: constants, pairs and all calibration frames."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional

from bevquant_export import compare_qdq_onnx, export_qdq_onnx, lint_onnx, open_onnx
from bevquant_export.half._bounds import Bounds
from bevquant_export.half._types import half_typed
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate, load_ranges, save_ranges

Between = Callable[[Tensor], Tensor]
ROWS = (torch.arange(192) * 5 % 72).view(2, 6, 16)
MASK = torch.arange(6) % 3 == 0
HALF = 10


class Net(nn.Module):
    """Two linear layers and floats between them."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16, bias=False), nn.Linear(16, 8)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


def attended(masked: Between) -> Between:
    return lambda x: masked(x @ x.transpose(-1, -2)).softmax(-1) @ x


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8)


def plain_norm(x: Tensor) -> Tensor:
    moved = x - x.mean(-1, keepdim=True)
    return moved / torch.sqrt((moved**2).mean(-1, keepdim=True) + 1e-8)


def embedded(x: Tensor) -> Tensor:
    angles = torch.arange(6.0)[:, None] * 700 / 10000 ** (torch.arange(8.0) / 8)
    return torch.sin(x * 100) + torch.cat([angles.sin(), angles.cos()], -1)


def inverse_sigmoid(x: Tensor) -> Tensor:
    p = x.sigmoid()
    return torch.log(p.clamp(min=1e-8) / (1 - p).clamp(min=1e-8))


SINGLE: dict[str, Between] = {
    "normalize": lambda x: functional.normalize(x, dim=-1),
    "another axis": lambda x: functional.normalize(x, dim=1),
    "sum": lambda x: x / (x.abs().sum(-1, keepdim=True) + 1e-9),
    "clamped norm": lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12),
    "rms": rms,
    "plain norm": plain_norm,
    "log": lambda x: torch.log(x.relu() + 1e-10),
    "inverse sigmoid": inverse_sigmoid,
    "power": lambda x: (x * 10) ** 4 / 1e4,
    "time": lambda x: x * ((torch.tensor(1.5e9) + x) - 1.5e9),
    "cells": lambda x: (x * 100).floor() * 1600 / 1e5,
    "sums of ones": lambda x: x * (torch.ones_like(x) * 300).cumsum(-1) / 4800,
    "angles": embedded,
    "infinite": lambda x: torch.nan_to_num(x / x.abs().mean(-1, keepdim=True)),
}
WHOLLY_HALF: dict[str, Between] = {
    "filled": attended(lambda w: w.masked_fill(MASK, -1e9)),
    "least": attended(lambda w: w.masked_fill(MASK, torch.finfo(torch.float32).min)),
    "infinite": attended(lambda w: w.masked_fill(MASK, float("-inf"))),
    "added": attended(lambda w: w + torch.where(MASK, -1e9, 0.0)),
    "chosen": attended(lambda w: torch.where(MASK, w, torch.tensor(-1e30))),
    "no numbers": torch.nan_to_num,
    "clamp": lambda x: torch.max(x, torch.tensor(-3e38)),
    "gelu": functional.gelu,
    "silu": lambda x: functional.silu(x) * 2 + 1,
    "norm": lambda x: functional.layer_norm(x, (16,)),
    "gathered from 72 rows": lambda x: x.repeat(1, 12, 1).gather(1, ROWS),
    "safe quotient": lambda x: x / (x.abs().sum(-1, keepdim=True) + 1),
}


class Beside(nn.Module):
    """Several such nets, of one input."""

    def __init__(self, functions: list[Between]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(Net, functions))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part(x) for part in self.parts]


def exported(net: Callable[[], nn.Module], folder: Path) -> tuple[nn.Module, Tensor, object]:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 16)
    model = quantize_model(net().eval(), example_inputs=x).model
    calibrate(model, [x, 3 * torch.randn(2, 6, 16)], method="max")
    return model, x, export_qdq_onnx(model, x, folder / "net.onnx", "tensorrt11")


def frames(x: Tensor) -> dict[str, Tensor]:
    padded = x.clone()
    padded[:, 3:] = 0
    larger = 3 * torch.randn(2, 6, 16)
    return {"example": x, "zeros": 0 * x, "padded": padded, "small": 1e-4 * x, "larger": larger}


@pytest.mark.parametrize("name", SINGLE)
def test_what_half_precision_cannot_compute_stays_float32(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    model, x, file = exported(lambda: Net(SINGLE[name]), tmp_path)
    assert any(": float32: " in note for note in file.notes)
    stated = {p.key: p.value for p in onnx.load(file.path).metadata_props}
    assert stated["float32"].splitlines() == [n for n in file.notes if ": float32: " in n]
    assert lint_onnx(file.path, "tensorrt11") == []
    run = open_onnx(file.path)
    for called, given in frames(x).items():
        (got,) = run({"x": given}).values()
        want = model(given.half().float()).detach()
        assert bool(((got - want).abs() <= 0.05 * want.abs().max()).all()), called


@pytest.mark.parametrize("names", [[*WHOLLY_HALF][i::3] for i in range(3)], ids=", ".join)
def test_what_half_precision_can_compute_stays_half(names: list[str], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    model, x, file = exported(lambda: Beside([WHOLLY_HALF[name] for name in names]), tmp_path)
    assert not any("float32" in note for note in file.notes)
    assert lint_onnx(file.path, "tensorrt11") == []
    run = open_onnx(file.path)
    for called, given in frames(x).items():
        made = run({"x": given}).values()
        for name, got, want in zip(names, made, model(given.half().float()), strict=True):
            assert bool(((got - want).abs() <= 0.05 * want.abs().max()).all()), (name, called)


class Frustum(nn.Module):
    """Pixels and depths to places, to features."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 16), nn.Linear(16, 8)
        self.register_buffer("inverse", torch.diag(torch.tensor([1 / 1266, 1 / 1266, 1.0])))

    def forward(self, pixel: Tensor, depth: Tensor) -> Tensor:
        place = torch.cat([pixel * depth, depth], -1) @ self.inverse
        return self.b(self.a(place / 60).relu())


def frustum(far: float) -> tuple[Tensor, Tensor]:
    return 1600 * torch.rand(1, 40, 2), 1 + (far - 1) * torch.rand(1, 40, 1)


@pytest.mark.parametrize("way", ["calibrated", "loaded", "unknown"])
def test_values_that_only_a_later_frame_has(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    near, far = frustum(20), frustum(60)
    model = quantize_model(Frustum().eval(), example_inputs=near).model
    calibrate(model, [near, far])
    if way != "calibrated":
        save_ranges(model, tmp_path / "ranges.json")
        model = quantize_model(Frustum().eval(), example_inputs=near).model
        model.load_state_dict(model.state_dict())
        torch.manual_seed(0)
        load_ranges(model, tmp_path / "ranges.json")
    if way == "unknown":
        for module in model.modules():
            module.__dict__.pop("_float_ranges", None)
    file = export_qdq_onnx(model, near, tmp_path / "net.onnx", "tensorrt11")
    assert any(note.startswith("Mul: float32: ") for note in file.notes)
    types = {p.name: p.type.tensor_type.elem_type for p in onnx.load(file.path).graph.input}
    assert set(types.values()) == ({1} if way == "unknown" else {HALF})
    names = dict(zip(file.inputs, far, strict=True))
    (got,) = open_onnx(file.path)(names).values()
    want = model(*far).detach()
    assert bool(((got - want).abs() <= 0.05 * want.abs().max()).all())


def test_means_of_integers_over_uneven_windows_stay_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    layers = nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Conv2d(64, 8, 1)
    model = quantize_model(nn.Sequential(*layers).eval(), example_inputs=x).model
    calibrate(model, [x])
    # Without a trial, which finds more than four differences of a tensor on its frames.
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "tensorrt11", verify=False)
    rows = compare_qdq_onnx(file, model, torch.randn(2, 3, 8, 8))
    assert sum(row.unexplained for row in rows) == 0


class Ids(nn.Module):
    """Cells of a grid as floats."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, cell: Tensor) -> Tensor:
        return self.a(x) + (cell - 4000)


def test_whole_numbers_that_half_precision_skips(tmp_path: Path) -> None:
    x, cells = torch.randn(3, 4), torch.tensor([[4001.0], [4003.0], [4005.0]])
    model = quantize_model(Ids().eval(), example_inputs=(x, cells)).model
    calibrate(model, [(x, cells)])
    file = export_qdq_onnx(model, (x, cells), tmp_path / "net.onnx", "tensorrt11")
    assert any("input cell: float32: whole numbers to 8010" in note for note in file.notes)
    types = {p.name: p.type.tensor_type.elem_type for p in onnx.load(file.path).graph.input}
    assert types == {"x": HALF, "cell": 1}
    (got,) = open_onnx(file.path)({"x": x, "cell": cells}).values()
    torch.testing.assert_close(got, model(x, cells).detach(), rtol=0.01, atol=0.01)


def linted(nodes: list[onnx.NodeProto], folder: Path, **constants: float) -> set[str]:
    tensors = [numpy_helper.from_array(np.float16(v), n) for n, v in constants.items()]
    ports = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT16, [2, 4]),
        helper.make_tensor_value_info("m", TensorProto.BOOL, [2, 4]),
    ]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)]
    graph = helper.make_graph(nodes, "net", ports, made, tensors)
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), folder / "a.onnx")
    return {finding.id for finding in lint_onnx(folder / "a.onnx", "tensorrt11")}


@pytest.mark.parametrize(
    ("guard", "found"), [(1e-12, {"TRT018"}), (1e-8, {"TRT018"}), (1e-3, set())]
)
def test_guards_of_other_files_are_linted(guard: float, found: set[str], tmp_path: Path) -> None:
    node = helper.make_node
    norm = [node("ReduceL2", ["x"], ["n"], axes=[-1]), node("Clip", ["n", "e"], ["c"])]
    assert linted([*norm, node("Div", ["x", "c"], ["y"])], tmp_path, e=guard) == found
    root = [node("Add", ["x", "e"], ["c"]), node("Sqrt", ["c"], ["s"])]
    assert linted([*root, node("Reciprocal", ["s"], ["y"])], tmp_path, e=guard) == found
    log = [node("Add", ["x", "e"], ["c"]), node("Log", ["c"], ["y"])]
    assert linted(log, tmp_path, e=guard) == found


def test_infinite_constants_of_other_files_are_linted(tmp_path: Path) -> None:
    node = helper.make_node
    mask = node("Where", ["m", "x", "i"], ["c"])
    assert linted([mask, node("Softmax", ["c"], ["y"])], tmp_path, i=-np.inf) == set()
    assert linted([mask, node("Exp", ["c"], ["y"])], tmp_path, i=-np.inf) == {"TRT019"}
    assert linted([node("Clip", ["x", "i"], ["y"])], tmp_path, i=-np.inf) == {"TRT019"}


@pytest.mark.parametrize(
    ("operator", "x", "want"),
    [
        ("Exp", (-1.0, 2.0), (np.exp(-1), np.exp(2))),
        ("Abs", (-3.0, 2.0), (0.0, 3.0)),
        ("Reciprocal", (2.0, 4.0), (0.25, 0.5)),
        ("Neg", (-3.0, 2.0), (-2.0, 3.0)),
        ("Relu", (-3.0, 2.0), (0.0, 2.0)),
        ("Sqrt", (0.0, 9.0), (0.0, 3.0)),
        ("Log", (1.0, 1.0), (0.0, 0.0)),
    ],
)
def test_bounds_of_one_operand(
    operator: str, x: tuple[float, float], want: tuple[float, float]
) -> None:
    values = numpy_helper.from_array(np.array(x, np.float32), "x")
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    node = helper.make_node(operator, ["x"], ["y"])
    graph = ir.from_proto(helper.make_graph([node], "g", [], [made], [values]))
    found = Bounds(graph, {})[graph.outputs[0]]
    np.testing.assert_allclose((found.low, found.high), want, rtol=1e-6)


def test_parts_in_float32_are_named_in_the_order_of_the_graph() -> None:
    graph = "g (float[4] x) => (float[4] y) { a = Tanh(x) b = Neg(a) y = Exp(b) }"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 19]> {graph}')
    found = [half_typed(proto, {"x": (1.0, False)}, keep=k).reasons for k in ("ab", "ba")]
    assert found[0] == found[1]
    assert [reason[:4] for reason in found[0]] == ["Tanh", "Neg:"]
