"""Points gathered in pillars, against a dictionary of cells; and models around them."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bevquant_hybrid import runtime
from bevquant_hybrid.nn import PointPillarsScatter
from bevquant_hybrid.nn.functional import point_pillars_preprocess
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    check_model,
    compile_model,
    convert,
    convert_fx,
    get_default_qat_qconfig,
    prepare_qat,
    prepare_qat_fx,
)
from bevquant_hybrid.utils.onnx_helper import export_to_onnx

QAT = get_default_qat_qconfig()
RANGE = [-2.0, -1.0, -3.0, 4.0, 3.5, 1.0]
SIZE = [0.75, 0.5, 2.0]
GRID = [8, 9, 2]


def gathered(cloud: np.ndarray, most: int | None, each: int) -> dict[tuple[int, ...], list[int]]:
    """Points of each cell, by number, in the order of their coming."""
    cells: dict[tuple[int, ...], list[int]] = {}
    for number, point in enumerate(cloud.tolist()):
        if not all(map(math.isfinite, point[:3])):
            continue
        ways = zip(point, RANGE[:3], SIZE, strict=False)
        cell = tuple(math.floor((p - low) / size) for p, low, size in ways)
        if not all(0 <= c < n for c, n in zip(cell, GRID, strict=True)):
            continue
        if cell not in cells and most is not None and len(cells) == most:
            continue
        cells.setdefault(cell, [])
        if len(cells[cell]) < each:
            cells[cell].append(number)
    return cells


def cloud_of(draw: random.Random, points: int) -> Tensor:
    """Points on borders of cells, outside of the range, and that are no places."""
    rows = []
    for _ in range(points):
        row = [low + draw.randint(-1, n) * size for low, n, size in zip(RANGE, GRID, SIZE,
               strict=False)]  # fmt: skip
        if draw.random() < 0.6:
            row = [value + draw.random() * size for value, size in zip(row, SIZE, strict=True)]
        if draw.random() < 0.1:
            row[draw.randint(0, 2)] = draw.choice([math.nan, math.inf, -math.inf])
        rows.append([*row, draw.random(), draw.random()])
    return torch.tensor(rows).reshape(-1, 5)


@pytest.mark.parametrize("seed", range(8))
def test_pillars_are_those_of_a_dictionary(seed: int) -> None:
    draw = random.Random(seed)
    clouds = [cloud_of(draw, draw.choice([0, 1, 60, 200])) for _ in range(draw.randint(1, 3))]
    most, each = draw.choice([1, 5, 200]), draw.choice([1, 3, 20])
    low, high = [0.0, -1.0, -3.0, 0.0, 0.5], [1.0, 2.0, 1.0, 2.0, 1.0]
    for use_max in (True, False):
        for dims in (None, torch.tensor([0, 4, 2])):
            features, coords = point_pillars_preprocess(
                *(clouds, torch.tensor(RANGE), torch.tensor(SIZE), most, each),
                use_max=use_max,
                norm_range=None if dims is None else torch.tensor(low + high),
                norm_dims=dims,
            )
            row = 0
            for sample, cloud in enumerate(clouds):
                cells = gathered(cloud.numpy(), most if use_max else None, each)
                for cell, points in cells.items():
                    assert coords[row].tolist() == [sample, *reversed(cell)]
                    expected = np.zeros((each, 5), np.float32)
                    expected[: len(points)] = cloud.numpy()[points]
                    for d in () if dims is None else dims.tolist():
                        shifted = expected[: len(points), d] - np.float32(low[d])
                        expected[: len(points), d] = shifted / np.float32(high[d] - low[d])
                    assert np.array_equal(features[row].numpy(), expected)
                    row += 1
                spare = most - len(cells) if use_max else 0
                assert (coords[row : row + spare] == -1).all()
                assert not features[row : row + spare].any()
                row += spare
            assert len(features) == len(coords) == row


def test_a_range_that_floats_cut_short_has_all_of_its_cells() -> None:
    """0.3/0.1 is 2.9999… of three cells in float32's tenths."""
    extent = torch.tensor([0.0, 0.0, 0.0, 0.3, 0.3, 0.3])
    cell = torch.tensor([0.1, 0.1, 0.1]).nextafter(torch.tensor(1.0))
    assert ((extent[3:].double() / cell.double()) < 3).all()
    points = torch.tensor([[0.25, 0.25, 0.25], [0.35, 0.0, 0.0]])
    _, coords = point_pillars_preprocess([points], extent, cell, 1, 1)
    assert coords.tolist() == [[0, 2, 2, 2]]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"points_list": []}, r"expected clouds \[points, dimensions\].*got \[\]"),
        ({"points_list": [torch.zeros(3, 2)]}, r"x, y and z among them, got \[\(3, 2\)\]"),
        ({"points_list": [torch.zeros(3, 4), torch.zeros(3, 5)]}, "of as many dimensions each"),
        ({"voxel_size": torch.tensor([1.0, 0.0, 1.0])}, r"voxel_size \[3\] above 0"),
        ({"max_voxels": 0}, "max_voxels=0.*expected 1 or more of each"),
        ({"voxel_size": torch.tensor([20.0, 1.0, 1.0])}, r"a grid of \[0, 4, 4\] cells"),
        (
            {"norm_range": torch.zeros(6), "norm_dims": torch.tensor([0])},
            r"expected norm_range \[8\] and norm_dims from 0 to 3",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict, what: str) -> None:
    given = {
        **{"points_list": [torch.zeros(3, 4)], "pc_range": torch.tensor([0.0, 0, 0, 4, 4, 4])},
        **{"voxel_size": torch.ones(3), "max_voxels": 5, "max_points_per_voxel": 2},
    }
    with pytest.raises(ValueError, match=f"point_pillars_preprocess: .*{what}"):
        point_pillars_preprocess(**(given | change))


class PointPillars(nn.Module):
    """From clouds to a map of features seen from above."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("range", torch.tensor([-2.0, -1.0, -3.0, 4.0, 3.0, 1.0]))
        self.register_buffer("size", torch.tensor([1.0, 1.0, 4.0]))
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.linear, self.relu = nn.Linear(4, 6), nn.ReLU()
        self.scatter, self.conv = PointPillarsScatter((2, 6, 4, 6)), nn.Conv2d(6, 3, 3)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        clouds = [first, second]
        features, coords = point_pillars_preprocess(clouds, self.range, self.size, 12, 5)
        each = self.relu(self.linear(self.quant(features)))
        return self.dequant(self.conv(self.scatter(torch.max(each, 1)[0], coords)))


def some_clouds() -> tuple[Tensor, Tensor]:
    low, extent = torch.tensor([-2.5, -1.5, -2, 0]), torch.tensor([7.0, 5, 2, 1])
    return torch.rand(40, 4) * extent + low, torch.rand(25, 4) * extent + low


@pytest.mark.parametrize("flow", ["fx", "eager"])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_goes_from_clouds_to_a_program(flow: str, tools, tmp_path, capsys) -> None:
    clouds, model = some_clouds(), PointPillars()
    if flow == "fx":
        made = prepare_qat_fx(model, {"": QAT})
        made(*clouds)
        converted = convert_fx(made)
    else:
        model.qconfig = QAT
        made = prepare_qat(model)
        made(*clouds)
        converted = convert(made.eval())
    made.eval()
    step = made.conv.activation_post_process.scale.item()
    assert (converted(*clouds) - made(*clouds)).abs().max() <= 1.01 * step
    assert (converted(*clouds) - model(*clouds)).abs().max() < 0.1 * model(*clouds).abs().max()
    forms = [converted] + [torch.jit.trace(converted, clouds)] * (flow == "eager")
    other = some_clouds()
    for number, form in enumerate(forms):
        capsys.readouterr()
        assert check_model(form, clouds, march="bayes") == 0
        assert "the CPU runs it, on floats, before the QuantStubs" in capsys.readouterr().out
        assert check_model(form, clouds, march="bernoulli2") == 1
        said = capsys.readouterr().out
        assert "horizon.nn.PointPillarsScatter (BAYES and BAYES_E alone)" in said
        summary = tools.perf_model(form, clouds, out_dir=tmp_path, layer_details=True)["summary"]
        layers = {row[0]: row for row in summary["layer details"]}
        assert layers["point_pillars_preprocess"][3].startswith("0.0 us")
        assert float(layers["scatter"][3].split()[0]) > 0
        assert compile_model(form, clouds, hbm=tmp_path / f"{number}.hbm") == 0
        compiled = runtime.load(tmp_path / f"{number}.hbm")
        for given in (clouds, other):
            assert torch.equal(compiled(*given), converted(*given))
        calls = [step.operator.partition("::")[2] for step in compiled.program.steps]
        assert {"point_pillars_preprocess", "scatter_pillars"} <= set(calls)


class Scattered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.scatter = PointPillarsScatter((1, 4, 6, 6))

    def forward(self, features: Tensor, coords: Tensor) -> Tensor:
        return self.dequant(self.scatter(self.quant(features), coords))


@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.float32])
def test_a_program_scatters_pillars_and_refuses_what_lies_outside(dtype, tmp_path) -> None:
    features, coords = torch.randn(5, 4), torch.tensor([[0, 0, i, 5 - i] for i in range(5)])
    made = prepare_qat_fx(Scattered(), {"": QAT})
    made(features, coords.to(dtype))
    converted = convert_fx(made)
    assert check_model(converted, (features, coords.to(dtype))) == 0
    compile_model(converted, (features, coords.to(dtype)), hbm=tmp_path / "net.hbm")
    compiled = runtime.load(tmp_path / "net.hbm")
    moved = coords.flip(0)
    expected = torch.zeros(1, 4, 6, 6)
    for row, (_, _, y, x) in zip(features, moved.tolist(), strict=True):
        expected[0, :, y, x] = row
    picture = compiled(features, moved.to(dtype))
    assert torch.equal(picture, converted(features, moved.to(dtype)))
    assert (picture - expected).abs().max() <= converted.quant.scale.item()
    for model in (converted, compiled):
        with pytest.raises(ValueError, match=r"a pillar at \[0, 0, 7, 12\] lies outside"):
            model(features, (coords + torch.tensor([0, 0, 7, 7])).to(dtype))


def test_scattered_pillars_are_scattered_by_onnxruntime(tmp_path) -> None:
    runner = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    features, coords = torch.randn(6, 4), torch.tensor([[0, 0, i, 5 - i] for i in range(6)])
    coords[3] = -1  # a row to spare
    made = prepare_qat_fx(Scattered(), {"": QAT}).eval()
    made(features, coords)
    path = str(tmp_path / "net.onnx")
    for opset in (11, 13):
        export_to_onnx(made, (features, coords), path, opset_version=opset,
                       operator_export_type=None)  # fmt: skip
    session = runner.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    given = dict(zip(names, (features.numpy(), coords.numpy()), strict=True))
    assert np.allclose(session.run(None, given)[0], made(features, coords).detach(), atol=1e-6)


class Gathered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()

    def forward(self, cloud: Tensor) -> tuple[Tensor, ...]:
        grid = torch.tensor(RANGE), torch.tensor(SIZE)
        rows = point_pillars_preprocess([cloud], *grid, 1, 2, use_max=False)
        return (*rows, self.dequant(self.quant(cloud)))


def test_without_a_limit_the_data_decide_how_many_rows_a_program_returns(tmp_path) -> None:
    model = Gathered()
    model.qconfig = QAT
    first, second = (cloud_of(random.Random(seed), 40).nan_to_num(9, 9, 9) for seed in (1, 2))
    made = prepare_qat(model)
    made(first)
    converted = convert(made.eval())
    compile_model(converted, (first,), hbm=tmp_path / "net.hbm")
    compiled = runtime.load(tmp_path / "net.hbm")
    assert compiled.outputs[0].shape is None
    lengths = set()
    for cloud in (first, second):
        result = compiled(cloud)
        assert all(map(torch.equal, result, converted(cloud)))
        lengths.add(len(result[0]))
    assert len(lengths) == 2
