"""Functions of floats beside integers: written as torch computes them, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevquant_export import (
    compare_qdq_onnx,
    export_qdq_onnx,
    lift_horizon_onnx,
    lint_onnx,
)
from bevquant_export.dense.nodes import _torch_form
from bevquant_export.dense.nodes._graph import Graph
from bevquant_export.dense.nodes._profile import profile_of
from bevquant_int8sim import simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate

Fixture = Callable[..., Any]

FILTER = torch.polar(torch.rand(4, 6, 4), torch.randn(4, 6, 4))
FLOATS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "mean of all": lambda x: torch.mean(x),
    "sum": lambda x: torch.sum(x, 1),
    "clamp": lambda x: x.clamp(-0.2, 0.3),
    "at least": lambda x: torch.clamp(x, min=-0.2),
    "matmul": lambda x: torch.matmul(x, x.transpose(-1, -2)),
    "matmul of batches": lambda x: torch.bmm(x.flatten(1, 2), x.mean(1)),
    "glu": lambda x: F.glu(x, 1),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.1, -0.2, 0.3, 0.0])),
    "prelu of a slope": nn.PReLU(),
    "power": lambda x: x**2,
    "sine": lambda x: x.sin() * x.reciprocal().cos(),
    "softmax": lambda x: torch.softmax(x, 1),
    "softmax at the end": lambda x: F.softmax(x, dim=-1),
    "softmax before the end": lambda x: torch.softmax(x, 2),
    "repeat": lambda x: x.sigmoid().repeat(1, 1, 1, 2),
    "layer norm": lambda x: F.layer_norm(x, (6, 6)),
    "random slope": F.rrelu,
    "divisor": lambda x: F.avg_pool2d(x, (2, 3), padding=1, divisor_override=5),
    "divisor in space": lambda x: F.avg_pool3d(x, 2, 1, divisor_override=3),
    "products so far": lambda x: (1 - x.sigmoid()).cumprod(1),
    "products so far, backwards": lambda x: x.flip(-1).cumprod(-1),
    "third": lambda x: x.kthvalue(3, dim=1)[0],
    "median": lambda x: x.median(-1, keepdim=True)[0] - x.median(),
    "median, of NaN": lambda x: x.sqrt().median(1, keepdim=True)[0].nan_to_num(7.0) * x,
    "places": lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5)) * x,
    "places of NaN": lambda x: torch.bucketize(x.sqrt(), torch.linspace(0, 1, 5), right=True) + x,
    "places in lists": lambda x: torch.searchsorted(x.sort(-1)[0], x.round(), side="right") + x,
    "distances": lambda x: torch.cdist(x[:, 0], x[:, 1]) + torch.cdist(x[:, 2], x[:, 3], 1.0),
    "other distances": lambda x: torch.cdist(x, x + 1, math.inf) + torch.cdist(x, x + 2, 3.0),
    "antialiased": lambda x: F.interpolate(x, (4, 9), mode="bilinear", antialias=True),
    "antialiased, corners": lambda x: F.interpolate(
        x, (3, 9), mode="bilinear", antialias=True, align_corners=True
    ),
    "antialiased, bicubic": lambda x: F.interpolate(
        x, scale_factor=0.6, mode="bicubic", antialias=True
    ),
    "einsum of three": lambda x: torch.einsum("bchw,bdhv,bdwv->bcd", x, x.sin(), x.cos()),
    "signs": lambda x: torch.copysign(x.exp(), x) + torch.copysign(x, -1.0),
    "corner": lambda x: x.tril(-1) + 2 * x.triu(2),
    "threshold": lambda x: F.threshold(x, 0.1, -0.2) + F.hardshrink(x),
    "logit": lambda x: torch.logit(x.sigmoid(), 1e-3),
    "at most, where NaN is not": lambda x: torch.where(x.sqrt() <= 1, 1.0, 2.0) * x,
    "reflect": lambda x: F.pad(x.sigmoid(), (1, 1, 2, 0), mode="reflect"),
    "circular": lambda x: F.pad(x.sigmoid(), (1, 2, 3, 0), mode="circular"),
    # A file's Concat takes one type.
    "cat of types": lambda x: torch.cat([x.gt(0).long(), x.gt(1).int()], 1),
    "stack of types": lambda x: torch.stack([x.gt(0), x], 2),
    "windows by number": lambda x: x[
        ..., torch.unique(torch.arange(x.shape[-1]) // 4, return_inverse=True)[1]
    ],
    "largest so far": lambda x: x.cummax(1)[0] + x.round().cummax(-2)[1],
    "smallest so far, of NaN": lambda x: x.sqrt().cummin(-1)[0].nan_to_num(7.0) * x,
    "filtered in frequencies": lambda x: torch.fft.irfft2(
        torch.fft.rfft2(x, norm="ortho") * FILTER, s=(6, 7), norm="ortho"
    ),
    "frequencies": lambda x: torch.fft.fftn(x, dim=(1, 3)).abs(),
    "frequencies, back": lambda x: torch.fft.ifft(torch.fft.fft(x, 9, 2), 4, 2).real,
}


class Behind(nn.Module):
    """A function of floats behind a convolution in integers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(4, 4, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x))


class Beside(nn.Module):
    """Several of them beside each other, each with a convolution of its own."""

    def __init__(self, functions: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(Behind, functions))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part(x) for part in self.parts]


def same(names: list[str], made: Iterable[Tensor], wanted: list[Tensor]) -> None:
    for name, one, want in zip(names, made, wanted, strict=True):
        torch.testing.assert_close(
            one, want, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


# In one net, most of whose time goes into following and comparing it.
@pytest.mark.parametrize("names", [[*FLOATS][i::5] for i in range(5)], ids=", ".join)
def test_functions_of_floats_are_torchs(
    names: list[str], calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(2, 4, 6, 6)
    model = calibrated(Beside([FLOATS[name] for name in names]), x)
    want = simulate(model, x)(x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx")
    made, _ = run(file, x, optimised=False)
    same(names, made, want)
    export_qdq_onnx(model, x, tmp_path / "mapper.onnx", "horizon")


@pytest.mark.parametrize("opset", [11, 13, 17, 18])
def test_axes_of_every_reduction_are_where_its_operator_set_has_them(opset: int) -> None:
    latest = onnx.defs.get_all_schemas()
    operators = sorted({s.name for s in latest if s.name.startswith("Reduce") and not s.domain})
    assert {"ReduceSum", "ReduceMin", "ReduceL2"} <= set(operators)
    graph = Graph(replace(profile_of("onnxruntime"), opset=opset))
    for operator in operators:
        graph.node(operator, "", ["x"], axes=[1], keepdims=0)
        node, schema = graph.nodes[-1], onnx.defs.get_schema(operator, opset, "")
        assert len(node.input) == 1 + ("axes" not in schema.attributes)
        assert {a.name for a in node.attribute} <= set(schema.attributes)


MASKS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "none": lambda x: {},
    "added": lambda x: {"attn_mask": x.abs().mean(1, keepdim=True)},
    # Also rows of which nothing is left.
    "truth": lambda x: {"attn_mask": (x > 0.3) & (x.mean(-1, keepdim=True) > 0)},
    "of keys": lambda x: {"attn_mask": x.mean((1, 2))[:, None, None] > 0},
    "causal": lambda x: {"is_causal": True},
}


@pytest.mark.parametrize("profile", ["onnxruntime", "horizon"])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_is_written_without_torchs_exporter(
    mask: str,
    profile: str,
    calibrated: Fixture,
    run: Fixture,
    once: Fixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x * 2, x + 1, **MASKS[mask](x))

    x = torch.randn(2, 4, 6, 6)
    model = once(mask, lambda: calibrated(Behind(attend), x))

    def others(graph: Any, step: Any, *rest: Any) -> Any:
        assert "attention" not in step.called
        return _torch_form.torch_form(graph, step, *rest)

    monkeypatch.setattr("bevquant_export.dense.nodes._emit.torch_form", others)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", profile)
    assert not [f for f in lint_onnx(file.path, profile) if f.severity == "error"]
    if profile == "onnxruntime":
        (made,), _ = run(file, x, optimised=False)
        torch.testing.assert_close(made, simulate(model, x)(x), rtol=1e-4, atol=1e-5)


def _drawn_over(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, :, 1:3] = 0
    return x


def _parts_written(x: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    made[..., :2] = x[..., 2:4].sin()
    made[..., 5:] = x[..., :1]
    made[:, -1] = x[:, 0].cos()
    made[:, :, 3] = 2 * x[:, :, 0]
    made[:] = made + x
    return made


@pytest.mark.parametrize("profile", ["onnxruntime", "tensorrt", "horizon"])
def test_parts_that_are_written_to_are_joined_with_what_stays(
    profile: str, calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(2, 4, 6, 6)
    model = calibrated(Behind(_parts_written), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", profile)
    operators = {node.op_type for node in onnx.load(file.path).graph.node}
    assert "Concat" in operators
    assert not [name for name in operators if "Scatter" in name]
    if profile != "horizon":  # whose scales no runtime here takes
        (made,), _ = run(file, x, optimised=False)
        torch.testing.assert_close(made, simulate(model, x)(x), rtol=1e-5, atol=1e-6)


def _painted(x: Tensor, *index: Any) -> Tensor:
    canvas = torch.ones_like(x)
    canvas[index] = x[index].sin()
    return canvas


def _pooled(x: Tensor, how: str) -> Tensor:
    place = (x[:, 0].flatten() * 3).long().clamp(0, 6)
    rows, grid = x.movedim(1, -1).reshape(-1, 4), x.new_zeros(7, 4)
    if how == "scatter_add":
        return grid.scatter_add(0, place[:, None].expand(-1, 4), rows)
    if how in ("amax", "amin"):
        return grid.scatter_reduce(0, place[:, None].expand(-1, 4), rows, how, include_self=False)
    if how == "index_add":
        return grid.index_add(0, place, rows)
    return grid.reshape(1, 7, 4).index_put((place * 0, place), rows, accumulate=True)


_MASK = torch.arange(6) % 3 > 0
_ROWS, _COLUMNS = torch.tensor([[0], [3]]), torch.tensor([5, 1, 2])

OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "painted by a mask behind": lambda x: _painted(x, slice(None), slice(None), slice(None), _MASK),
    "painted by a mask between": lambda x: _painted(x, slice(None), slice(None), _MASK),
    "painted by a mask of values": lambda x: _painted(x.sigmoid(), slice(None), x[0] > 0),
    "painted at crossings": lambda x: _painted(x, slice(None), slice(None), _ROWS, _COLUMNS),
    "painted at crossings in front": lambda x: _painted(x, torch.tensor([[0], [1]]), _ROWS[:, 0]),
    "painted apart": lambda x: _painted(x, torch.tensor([0, 1]), slice(None), _ROWS[:, 0]),
    "painted with one value": lambda x: x.sigmoid().index_put((_ROWS[:1, 0],), torch.tensor(0.5)),
    "mean in float64": lambda x: torch.mean(x, 1, dtype=torch.float64).float(),
    "clamp to a tensor": lambda x: torch.clamp(x, x.mean(), None),
    "softplus of a low threshold": lambda x: F.softplus(x, threshold=1),
    "group norm": lambda x: F.group_norm(x, 2),
    "einsum": lambda x: torch.einsum("bchw,bdhw->bcd", x, x),
    "the larger of each, and where": lambda x: torch.where(x > 0, *x.max(1, keepdim=True)),
    "gather": lambda x: torch.gather(x, 1, x.argsort(1)),
    "sorted": lambda x: x.sort(dim=1, descending=True, stable=True)[0] + x.argsort(stable=True),
    "index": lambda x: x.sin()[:, torch.tensor([3, 1, 0, 2])],
    "index by int32": lambda x: x.sin()[:, torch.tensor([3, 1, 0, 2]).int(), torch.arange(4).int()],
    "index by int32 of values": lambda x: x[:, (x[0, :, 0, 0] * 2).int().clamp(0, 3)].cos(),
    "painted at int32": lambda x: _painted(x, slice(None), (x[0, 0, 0, :2] > 0).int() * 2),
    "mask": lambda x: x * (torch.arange(6) < 4) + x.masked_fill(x > 0.2, -1.0),
    "written to": _drawn_over,
    "grid_sample": lambda x: F.grid_sample(
        x, x[:, :2].tanh().permute(0, 2, 3, 1), padding_mode="border", align_corners=True
    ),
    "grid_sample of zeros": lambda x: F.grid_sample(
        x, 1.2 * x[:, :2].tanh().permute(0, 2, 3, 1), align_corners=False
    ),
    "grid_sample of the nearest": lambda x: F.grid_sample(
        x, x[:, :2].tanh().permute(0, 2, 3, 1), mode="nearest", align_corners=False
    ),
    "einsum of squares": lambda x: torch.einsum("bchw,bchw->bchw", x, x),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "rows by a mask": lambda x: x.sigmoid()[:, torch.arange(4) > 1],
    "rows that a value chooses": lambda x: x[:, x.amax((0, 2, 3)) > -9.0].cumsum(1),
    "pooled by scatter_add": lambda x: _pooled(x, "scatter_add"),
    "largest of a place": lambda x: _pooled(x, "amax") - _pooled(x, "amin"),
    "pooled by index_add": lambda x: _pooled(x, "index_add"),
    "pooled by index_put": lambda x: _pooled(x, "index_put"),
    "whole numbers divided": lambda x: (x * 9).long() // x.shape[-1] * 0.5,
    "patches put back": lambda x: F.fold(F.unfold(x, 2, stride=2).sigmoid(), (6, 6), 2, stride=2),
    "patches added": lambda x: F.fold(F.unfold(x, 3).sigmoid(), (6, 6), 3),
    "trilinear": lambda x: F.interpolate(x[:, None], scale_factor=2, mode="trilinear")[:, 0],
    "unit length": lambda x: F.normalize(x, dim=1),
    "logarithms of shares": lambda x: F.log_softmax(x, 1),
    "lists, and what stands in them": lambda x: torch.hstack(
        [
            torch.hypot(x, x + 1),
            torch.cross(x[:, :3], x[:, 1:], dim=1),
            torch.fmax(x, x.flip(1)),
            torch.block_diag(x[0, 0], x[1, 0]).view(2, 2, 6, 6),
        ]
    ),
    "steps in memory": lambda x: x.contiguous().as_strided((2, 4, 3, 6), (144, 36, 12, 1)),
    "largest of equal windows": lambda x: (
        F.adaptive_max_pool2d(x.sin(), (2, 3)) + F.adaptive_max_pool2d(x.sin(), 1)
    ),
    "largest of unequal windows": lambda x: (
        F.adaptive_max_pool2d(x.sin(), (4, 9))
        + F.adaptive_max_pool3d(x.sin(), (3, 4, 1))[:, :1]
        + F.adaptive_max_pool1d(x[:, 0].sin(), 9).sum(1)[:, None, None]
        + F.adaptive_max_pool1d(x[:, 0].sin(), 1)[:, None, :4]
    ),
    "places of the largest": lambda x: F.adaptive_max_pool2d(x, 4, return_indices=True)[1] * 0.5,
    "equal parts of a cell": lambda x: torch.gru_cell(
        x[:, 0, 0], x[:, 1, 1], *torch.linspace(-1, 1, 216).view(2, 18, 6)
    ),
    "parts of several sizes": lambda x: torch.cat(x.sin().chunk(4, -1)[::-1], -1),
    "by the range of all": lambda x: (x - x.amin()) / x.amax(keepdim=True) * (x > 0).amax(),
    "by the range": lambda x: (x - x.aminmax()[0]) / (x.aminmax(dim=1, keepdim=True)[1].exp() + 1),
    "weights of one axis": lambda x: F.linear(x.softmax(-1), torch.linspace(0, 5, 6)),
}


# Newer than operator set 13, or of sizes that values decide: each alone.
NEWER = {name: 16 for name in OTHERS if name.startswith("grid_sample")}
ALONE = [*NEWER, "painted by a mask of values", "rows that a value chooses"]
TOGETHER = [name for name in OTHERS if name not in ALONE]
nets = pytest.mark.parametrize(
    "names", [[name] for name in ALONE] + [TOGETHER[i::5] for i in range(5)], ids=", ".join
)


@pytest.fixture
def behind(calibrated: Fixture, once: Fixture) -> Fixture:
    """A calibrated net with some of `OTHERS`, the integer model of it, and their input."""

    def make(names: list[str]) -> Any:
        x = torch.randn(2, 4, 6, 6)
        net = Beside([OTHERS[name] for name in names])
        model = calibrated(net, x, quantize_sample=False)
        return model, simulate(model, x), x

    return lambda names: once(str(names), lambda: make(names))


@nets
def test_what_is_not_on_the_list_has_torchs_own_form(
    names: list[str], behind: Fixture, run: Fixture, tmp_path: Path
) -> None:
    model, integer, x = behind(names)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx")
    assert file.opset == NEWER.get(names[0], 13)
    assert not [f for f in lint_onnx(file.path, "tensorrt") if f.severity == "error"]
    made, _ = run(file, x, optimised=False)
    same(names, made, integer(x))


class Repeated(nn.Module):
    """Rows repeated by counts that the frame gives, as points per voxel."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        rows = torch.repeat_interleave(self.fc(x), counts, 0)
        owner = torch.repeat_interleave(torch.arange(3), counts, output_size=12)
        return rows.sum(0) + (owner * torch.arange(12)).sum()


@pytest.mark.parametrize("profile", ["onnxruntime", "tensorrt11"])
def test_rows_are_repeated_by_counts(profile: str, tmp_path: Path) -> None:
    """The axis of torch's CumSum has one dimension; ONNX's reference and its text want none."""
    frames = [(torch.randn(3, 4), torch.tensor(counts)) for counts in ([3, 4, 5], [2, 10, 0])]
    model = quantize_model(Repeated().eval(), example_inputs=frames[0]).model
    calibrate(model, frames)
    file = export_qdq_onnx(model, frames[0], tmp_path / "net.onnx", profile)
    assert not any(row.unexplained for row in compare_qdq_onnx(file, model, frames[1]))


def test_circular_padding_needs_no_engines_pad(calibrated: Fixture, tmp_path: Path) -> None:
    """OpenVINO's importer refuses Pad's mode "wrap"."""
    x = torch.randn(1, 4, 6, 6)
    model = calibrated(Behind(FLOATS["circular"]), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    operators = [node.op_type for node in onnx.load(file.path).graph.node]
    assert operators.count("Concat") == 2
    assert "Pad" not in operators


def test_numbers_of_float64_stay_such_and_the_linter_names_them(
    calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(1, 4, 5, 5)
    model = calibrated(Behind(lambda x: (x.double() * 1.1 + 0.1).float()), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx")
    assert {f.id for f in lint_onnx(file.path, "tensorrt") if f.severity == "error"} == {"ONX016"}
    (made,), _ = run(file, x, optimised=False)
    torch.testing.assert_close(made, simulate(model, x)(x), rtol=1e-6, atol=1e-6)


@nets
def test_the_mappers_operator_set_has_it_too(
    names: list[str], behind: Fixture, tmp_path: Path
) -> None:
    (model, integer, x), path = behind(names), tmp_path / "a.onnx"
    assert export_qdq_onnx(model, x, path, "horizon").opset == 11
    assert not [f for f in lint_onnx(path, "horizon") if f.id == "HRZ002"]
    session = onnxruntime.InferenceSession(lift_horizon_onnx(path).SerializeToString())
    made = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    same(names, map(torch.from_numpy, made), integer(x))


def test_the_form_of_one_call_takes_any_batch(
    calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(2, 4, 6, 6)
    model = calibrated(Behind(lambda x: x.cumsum(2)), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", dynamic_batch=True)
    wider = torch.randn(5, 4, 6, 6)
    (made,), _ = run(file, wider, optimised=False)
    torch.testing.assert_close(made, simulate(model, x)(wider), rtol=1e-4, atol=1e-5)


OFF = {
    "conv": ["0._input_quantizer", "0._weight_quantizer"],
    "conv with quantized weights": ["0._input_quantizer"],
    "pool": ["2._input_quantizer"],
    "transposed": ["3._input_quantizer", "3._weight_quantizer"],
    "linear": ["5._input_quantizer", "5._weight_quantizer"],
}


@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime"])
@pytest.mark.parametrize("name", OFF)
def test_layers_whose_quantizers_are_off_stay_float(
    name: str, profile: str, calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    net = nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip
    x = torch.randn(2, 4, 8, 8)
    model = calibrated(net, x)
    for path in OFF[name]:
        model.get_submodule(path).disable()
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", profile)
    assert (name == "pool") or any("input quantizer is off" in line for line in file.floats)
    # Optimised, a file for TensorRT is fused into other roundings.
    (made,), _ = run(file, x, optimised=profile == "onnxruntime")
    want = simulate(model, x)(x)
    torch.testing.assert_close(made, want, rtol=0, atol=2e-6)


def test_a_layer_that_quantizes_its_input_alone_has_a_pair_before_float_weights(
    calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(1, 4, 8, 8)
    model = calibrated(nn.Sequential(nn.Conv2d(4, 4, 1)), x)
    model.get_submodule("0._weight_quantizer").disable()
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx")
    (made,), operators = run(file, x, optimised=False)
    assert (operators["QuantizeLinear"], operators["DequantizeLinear"]) == (1, 1)
    torch.testing.assert_close(made, simulate(model, x)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "forms"),
    [(lambda x: x.cumsum(-1), 1), (lambda x: x.sin()[:, x[0, :, 0, 0].argsort()], 2)],
)
def test_a_form_of_torchs_exporter_is_made_once(
    function: Any, forms: int, calibrated: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(args[0])
        return write(*args, **kwargs)

    write = torch.onnx.export
    monkeypatch.setattr(torch.onnx, "export", noted)
    monkeypatch.setattr(_torch_form, "_known", {})
    x = torch.randn(2, 4, 6, 6)
    model = calibrated(nn.Sequential(*[Behind(function) for _ in range(2)]), x)
    files = [export_qdq_onnx(model, x, tmp_path / f"{name}.onnx") for name in "ab"]
    assert len(made) == forms  # of two calls in each of two files
    assert files[0].path.read_bytes() == files[1].path.read_bytes()
    export_qdq_onnx(model, x, tmp_path / "c.onnx", "horizon")  # of an earlier operator set
    assert len(made) == 2 * forms
    monkeypatch.setattr(_torch_form, "_MOST", 1)
    _torch_form._remember("another", (None, 0))
    assert list(_torch_form._known) == ["another"]


def test_a_form_of_torchs_exporter_serves_any_size_of_a_free_axis(
    calibrated: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(x: Tensor) -> Tensor:
        values = x.flatten()
        few, many = values[values > values.mean()], values[values > values.min()]
        return x + few.cumsum(0).sum() - many.cumsum(0).sum()

    monkeypatch.setattr(_torch_form, "_known", {})
    x = torch.randn(2, 4, 6, 6)
    model = calibrated(Behind(chosen), x)
    export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    forms = [key for key in map(str, _torch_form._known) if "cumsum" in key]
    assert len(forms) == 1


class Shifted(nn.Module):
    """Attention over shifted windows, with a mask that the forward fills for the map's size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).roll((-1, -1), (2, 3))
        height, width = x.shape[2:]
        mask, count = torch.zeros(1, 1, height, width), 0
        for rows in (slice(0, -2), slice(-2, -1), slice(-1, None)):
            mask[:, :, rows] = count
            count += 1
        one, each = (self._windows(y, height, width) for y in (mask, x))
        apart = one.mT - one
        scores = each.mT @ each + apart.masked_fill(apart != 0, -100.0)
        return self.out(x) * scores.softmax(-1).mean()

    @staticmethod
    def _windows(x: Tensor, height: int, width: int) -> Tensor:
        x = x.reshape(x.shape[0], x.shape[1], height // 2, 2, width // 2, 2)
        return x.permute(0, 2, 4, 1, 3, 5).flatten(4).flatten(1, 2)


@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime"])
def test_what_is_computed_of_sizes_alone_is_a_constant(
    profile: str, calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(2, 4, 6, 6)
    model = calibrated(Shifted(), x)
    want = simulate(model, x)(x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", profile)
    written = {node.op_type for node in onnx.load(file.path).graph.node}
    assert not written & {"ConstantOfShape", "ScatterND", "Expand", "Where", "Sub", "Not", "Equal"}
    (made,), _ = run(file, x)
    torch.testing.assert_close(made, want, rtol=1e-4, atol=1e-5)
    free = export_qdq_onnx(model, x, tmp_path / "free.onnx", profile, dynamic_batch=True)
    (made,), _ = run(free, x[:1])
    torch.testing.assert_close(made, simulate(model, x)(x[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime", "horizon"])
def test_group_norm_is_written_without_torchs_exporter(
    affine: bool,
    profile: str,
    calibrated: Fixture,
    once: Fixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(2, 4, 6, 6) * 3

    def make() -> nn.Module:
        norm = nn.GroupNorm(2, 4, eps=1e-3, affine=affine)
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        return calibrated(Behind(norm), x)

    model = once(f"group norm {affine}", make)
    monkeypatch.setattr("bevquant_export.dense.nodes._emit.torch_form", None)
    free = profile != "horizon"
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", profile, dynamic_batch=free)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    proto = lift_horizon_onnx(file.path).SerializeToString()
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    for frame in (x, x[:1] + 1) if free else (x,):
        (made,) = session.run(None, {session.get_inputs()[0].name: frame.numpy()})
        want = simulate(model, x)(frame)
        torch.testing.assert_close(torch.from_numpy(made), want, rtol=1e-4, atol=1e-5)
