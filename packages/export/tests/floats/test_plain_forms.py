"""Operators by plain ones, against torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevquant_export import export_float_onnx
from bevquant_export.floats._plain_forms import plain_forms

pytest.importorskip("onnxscript", reason="the float extra is not installed")

_SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30, 3e37, -3e37, 0.7, -2.5]


def _pairs() -> tuple[Tensor, Tensor]:
    y, x = torch.meshgrid(torch.tensor(_SPECIAL), torch.tensor(_SPECIAL), indexing="ij")
    more = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    return torch.cat([y.flatten(), more[0]]), torch.cat([x.flatten(), more[1]])


def test_an_angle_is_right_in_every_quadrant_and_on_the_axes() -> None:
    y, x = _pairs()
    with plain_forms(18):
        made = torch.atan2(y, x)
    torch.testing.assert_close(made, torch.atan2(y, x), rtol=3e-7, atol=0)
    assert torch.equal(made.signbit(), y.signbit())


def test_an_angle_in_a_file(tmp_path: Path) -> None:
    class Angle(nn.Module):
        def forward(self, y: Tensor, x: Tensor) -> Tensor:
            return torch.nan_to_num(torch.atan2(y, x))

    y, x = _pairs()
    file = export_float_onnx(Angle().eval(), (y, x), tmp_path / "angle.onnx")
    proto = onnx.load(file.path)
    assert not {node.op_type for node in proto.graph.node} & {"IsNaN", "IsInf"}
    session = onnxruntime.InferenceSession(file.path, providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_inputs()]
    (made,) = session.run(None, dict(zip(names, (y.numpy(), x.numpy()), strict=True)))
    assert (torch.from_numpy(made) - torch.atan2(y, x)).abs().max() <= 2 * math.pi * 2**-23


def test_what_is_not_finite_becomes_a_number() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    with plain_forms(11):
        for nan in (None, 2.0):
            assert torch.equal(torch.nan_to_num(x, nan), x.clone().nan_to_num(nan))
        assert torch.equal(torch.nan_to_num(x > 0), x > 0)


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("sizes", [(5, 7), (1, 4), (3, 4, 5)])
def test_a_grid_is_sampled_by_gathers(
    mode: str, padding: str, corners: bool, sizes: tuple[int, ...]
) -> None:
    if mode == "bicubic" and len(sizes) == 3:
        pytest.skip("torch has none either")
    x = torch.randn(2, 3, *sizes)
    grid = 1.5 * torch.randn(2, *[6] * len(sizes), len(sizes))
    grid.view(-1)[:3] = torch.tensor([-1.0, 1.0, 40.0])
    codes = ["bilinear", "nearest", "bicubic"], ["zeros", "border", "reflection"]
    given = (codes[0].index(mode), codes[1].index(padding), corners)
    sampler = getattr(torch.ops.aten, f"grid_sampler_{len(sizes)}d")
    with plain_forms(11):
        made = sampler.default(x, grid, *given)
    want = F.grid_sample(x, grid, mode, padding, corners)
    torch.testing.assert_close(made, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "equation",
    [
        "bnqd,bnkd->bnqk", "bqc,bchw->bqhw", "ij,jk", "bij,bjk->ik", "bhwc,hkc->bhwk",
        "bi,bj->bij", "bij->ji", "bij,b->j", "b...i,b...i->b...",
    ],
)  # fmt: skip
def test_sums_of_products(equation: str) -> None:
    sizes = dict(zip("bnqdkchwij", (2, 3, 4, 5, 6, 7, 3, 2, 4, 5), strict=True))
    terms = equation.partition("->")[0].replace("...", "").split(",")
    operands = [
        torch.randn([sizes[label] for label in term], dtype=torch.float64) for term in terms
    ]
    with plain_forms(11):
        made = torch.einsum(equation, *operands)
    torch.testing.assert_close(made, torch.einsum(equation, *operands))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clamp(-2, 3), lambda x: x.clamp(max=1), lambda x: torch.clamp_min(x, 2),
        lambda x: x % 3, lambda x: x % -4, lambda x: torch.remainder(x, torch.tensor([5, -3])),
        lambda x: x // 5, lambda x: x // -4, lambda x: torch.floor_divide(x, 3),
        lambda x: torch.div(x, 7, rounding_mode="floor"), lambda x: x / 3,
        lambda x: x >= 3, lambda x: torch.le(x, x.flip(0)),
    ],
)  # fmt: skip
def test_whole_numbers(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.arange(-12, 12).view(12, 2)
    with plain_forms(11):
        made = function(x)
    assert torch.equal(made, function(x))


def test_a_quotient_that_rounds_up_to_a_whole_number_is_none(tmp_path: Path) -> None:
    """Points at the border of a voxel, as ONNX Runtime finds their voxel."""

    class Voxel(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.div(x, 0.8, rounding_mode="floor"), torch.remainder(x, 0.8)

    borders = torch.arange(-60, 60) * 0.8
    x = torch.cat([borders, torch.nextafter(borders, torch.tensor(-9e9))])
    assert (Voxel()(x)[0] != (x / 0.8).floor()).any()
    file = export_float_onnx(Voxel().eval(), (x,), tmp_path / "voxel.onnx", tolerance=None)
    found = onnxruntime.InferenceSession(file.path).run(None, {"x": x.numpy()})
    for made, wanted in zip(found, Voxel()(x), strict=True):
        assert torch.equal(torch.from_numpy(made), wanted)


_PLACES = torch.tensor([[4, 0, 4], [1, 1, 0], [4, 2, 3], [3, 3, 3]])


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
@pytest.mark.parametrize(
    "function",
    [
        lambda y, x: y.scatter_add(0, _PLACES, x),
        lambda y, x: y[:4].scatter_add(1, _PLACES % 3, x),
        lambda y, x: y.scatter_add(-2, _PLACES[:2], x),
        lambda y, x: y.index_add(0, _PLACES[2], x[1:]),
        lambda y, x: y.index_add(1, torch.tensor([2]), y[:, :1], alpha=-2),
        lambda y, x: y[:, 0].index_add(0, _PLACES[2], x[1:, 0]),
        lambda y, x: y.index_put((_PLACES[:, 0] - 5,), x, accumulate=True),
        lambda y, x: y.index_put((_PLACES[:, 0], _PLACES[:, 1] % 3), x[:, 0], accumulate=True),
        lambda y, x: y.index_put((_PLACES[:, 0, None], torch.arange(3)), x, accumulate=True),
        lambda y, x: y.index_put((_PLACES[0],), x[0], accumulate=False),
        lambda y, x: y.clone().index_add_(0, _PLACES[2], x[1:]),
        lambda y, x: y.scatter_reduce(0, _PLACES, x, "sum"),
        lambda y, x: y.scatter_reduce(0, _PLACES, x, "sum", include_self=False),
        lambda y, x: y.scatter_reduce(0, _PLACES, x, "mean"),
        lambda y, x: y.clone().scatter_reduce_(0, _PLACES, x, "mean", include_self=False),
        lambda y, x: y.scatter_reduce(0, _PLACES, x, reduce="amax"),
        lambda y, x: y.scatter_reduce(0, _PLACES[:3], x, "amax", include_self=False),
        lambda y, x: y.scatter_reduce(-2, _PLACES, x, "amin"),
        lambda y, x: y.clone().scatter_reduce_(0, _PLACES, x, "amin", include_self=False),
        lambda y, x: y.index_reduce(0, _PLACES[:, 0], x, "mean"),
        lambda y, x: y[:, 0].index_reduce(0, _PLACES[2], x[1:, 0], "amax", include_self=False),
        lambda y, x: y.index_reduce(-1, _PLACES[1, 1:], x[[0, 1, 2, 3, 0]][:, 1:], "amin"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scatter_sums", [True, False])
def test_sums_over_places(function: Callable[[Tensor, Tensor], Tensor], scatter_sums: bool) -> None:
    random = torch.Generator().manual_seed(0)
    y, x = torch.randn(5, 3, generator=random), torch.randn(4, 3, generator=random)
    with plain_forms(18, scatter_sums=scatter_sums):
        made = function(y, x)
    torch.testing.assert_close(made, function(y, x))


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
@pytest.mark.parametrize(
    "function",
    [
        lambda y, x: y.index_add(0, _PLACES[:, 0], x),
        lambda y, x: y.index_put((_PLACES[:, 0],), x, accumulate=True),
        lambda y, x: torch.ops.aten.index_put(y.t(), [None, _PLACES[:, 0]], x.t(), True),
        lambda y, x: y.scatter_add(0, _PLACES, x),
        lambda y, x: y.scatter_reduce(0, _PLACES, x, "sum"),
        lambda y, x: y.index_reduce(0, _PLACES[:, 0], x, "amax"),
    ],
)  # fmt: skip
def test_sums_are_taken_in_order(
    function: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    """ONNX Runtime's ScatterND lets its threads write to one place at once."""

    class Sums(torch.nn.Module):
        def forward(self, y: Tensor, x: Tensor) -> Tensor:
            return function(y, x)

    random = torch.Generator().manual_seed(0)
    y, x = torch.randn(5, 3, generator=random), torch.randn(4, 3, generator=random)
    path = tmp_path / "sums.onnx"
    export_float_onnx(Sums().eval(), (y, x), path, tolerance=None)
    scatters = [node for node in onnx.load(path).graph.node if node.op_type.startswith("Scatter")]
    assert [node.op_type for node in scatters] == ["ScatterElements"]
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(path)
    (made,) = session.run(None, {"y": y.numpy(), "x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(made), function(y, x), rtol=0, atol=0)


def test_a_sum_over_too_many_places_is_refused_with_the_remedy() -> None:
    y, x = torch.zeros(1, 1).expand(16384, 80), torch.zeros(1, 1).expand(8192, 80)
    with plain_forms(18, scatter_sums=False), pytest.raises(ValueError, match=r"16384.*bev_pool"):
        y.index_add(0, torch.arange(8192), x)


@pytest.mark.parametrize(
    ("size", "kernel", "options"),
    [
        ((8, 6), 2, {"stride": 2}), ((8, 6), (4, 3), {"stride": (4, 3)}),
        ((7, 6), 2, {"stride": 2}), ((8, 7), 3, {}),
        ((9, 8), 3, {"stride": 2, "padding": 1}), ((9, 8), 2, {"dilation": 3}),
    ],
)  # fmt: skip
def test_patches_are_put_back(size: Any, kernel: Any, options: Any) -> None:
    image = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    patches = F.unfold(image, kernel, **options)
    for x in (patches, patches[0]):
        with plain_forms(18):
            made = F.fold(x, size, kernel, **options)
        torch.testing.assert_close(made, F.fold(x, size, kernel, **options))


@pytest.mark.parametrize("options", [
    {"scale_factor": 2}, {"size": (7, 4, 9)}, {"size": (3, 12, 5), "align_corners": True},
    {"scale_factor": (1.7, 2.0, 1.3)}, {"scale_factor": 1.5, "recompute_scale_factor": True},
])  # fmt: skip
def test_volumes_are_resized_by_slices_and_lines(options: Any) -> None:
    x = torch.randn(2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    with plain_forms(11):
        made = F.interpolate(x, mode="trilinear", **options)
    torch.testing.assert_close(made, F.interpolate(x, mode="trilinear", **options))


@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim:UserWarning")
def test_vectors_lengths_and_stacks() -> None:
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 4, generator=random), torch.randn(3, 4, generator=random)
    x[0, 0], x[0, 1], y[0, 1], y[0, 2] = 0, torch.nan, torch.nan, torch.nan
    y[0, 0] = 0
    a, b = torch.randn(2, 3, 3, generator=random), torch.randn(2, 3, 3, generator=random)
    functions = [
        lambda: torch.fmax(x, y), lambda: torch.fmin(x, y), lambda: torch.hypot(x, y),
        lambda: torch.hypot(x * 1e30, y), lambda: torch.linalg.cross(a, b),
        lambda: torch.cross(a, b), lambda: torch.cross(a, b, dim=1),
        lambda: torch.hstack([x[0], y[1]]), lambda: torch.vstack([x[0], y]),
        lambda: torch.dstack([x, y]), lambda: torch.column_stack([x[:, 0], y]),
    ]  # fmt: skip
    for function in functions:
        with plain_forms(13):
            made = function()
        torch.testing.assert_close(made, function(), equal_nan=True)
