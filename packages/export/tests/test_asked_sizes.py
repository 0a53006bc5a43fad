"""Files of models whose forwards ask about sizes: refused, or the condition is in the metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_export import (
    export_detector,
    export_qdq_onnx,
    export_sparse_onnx,
    lint_onnx,
    load_sparse_onnx,
    lower_to_portable,
    open_onnx,
)
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate
from bevquant_sparse import use_bevquant_kernels

pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")
spconv = pytest.importorskip("spconv.pytorch")
ASKED = (
    r"coords: expected coords\.shape\[0\] <= 100, as the forward asks in .*test_asked_sizes\.py:\d+"
)


class Dense(nn.Module):
    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.conv, self.ask = nn.Conv2d(3, 4, 3), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.ask(self.conv(x))


def quantized(net: nn.Module, frame: Any) -> nn.Module:
    made: nn.Module = quantize_model(net.eval(), example_inputs=frame).model
    calibrate(made, [frame], forward=lambda model, given: model(*given))
    return made


def branch(x: Tensor) -> Tensor:
    return x.relu() if x.shape[0] == 1 else x


def few(x: Tensor) -> Tensor:
    return x.relu() if len(x) > 3 else x


def number(x: Tensor) -> Tensor:
    return x * float(x.numel()) / 1000


@pytest.mark.parametrize("ask", [branch, few, number, torch.squeeze])
def test_a_batch_that_the_forward_asks_about_is_not_free(ask: Any, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = quantized(Dense(ask), (x,))
    match = r"dynamic_batch=True, but .*x\.shape\[0\].*\.py"
    with pytest.raises(ValueError, match=match):
        export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime", dynamic_batch=True)
    assert not list(tmp_path.iterdir())
    export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    assert lint_onnx(tmp_path / "net.onnx", "onnxruntime") == []


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("profile", ["onnxruntime", "tensorrt10", "horizon"])
def test_a_map_resized_to_a_size_has_any_batch(mode: str, profile: str, tmp_path: Path) -> None:
    x = torch.randn(1, 3, 29, 26)
    net = Dense(lambda y: F.interpolate(y, size=(25, 16), mode=mode))
    model = quantized(net, (x,))
    export_qdq_onnx(model, x, tmp_path / "net.onnx", profile, dynamic_batch=True)
    y = torch.randn(3, 3, 29, 26)
    made = open_onnx(tmp_path / "net.onnx")({"x": y})["output"]
    wanted = model(y).detach()
    step = float(wanted.abs().max()) / 127
    torch.testing.assert_close(made, wanted, rtol=0, atol=2 * step)


class Encoder(nn.Module):
    def __init__(self, head: bool) -> None:
        super().__init__()
        self.first = spconv.SubMConv3d(4, 8, 3, padding=1, bias=True, indice_key="a")
        self.second = spconv.SparseConv3d(8, 8, 3, stride=2, padding=1, bias=True)
        self.head = nn.Conv2d(24, 4, 1) if head else nn.Identity()

    def forward(self, x: Any) -> Tensor:
        f = x.features
        if len(f) > 100:
            f = f * 2
        y = self.second(self.first(x.replace_feature(f))).dense().permute(0, 1, 4, 2, 3)
        made: Tensor = self.head(y.reshape(y.shape[0], -1, y.shape[3], y.shape[4]))
        return made


def frame(voxels: int) -> Any:
    generator = torch.Generator().manual_seed(voxels)
    places = torch.randperm(16 * 16 * 5, generator=generator)[:voxels]
    coords = torch.stack(torch.unravel_index(places, (1, 16, 16, 5)), 1).int()
    features = torch.randn(voxels, 4, generator=generator)
    return spconv.SparseConvTensor(features, coords, [16, 16, 5], 1)


def encoder(head: bool) -> nn.Module:
    net = Encoder(head)
    use_bevquant_kernels(net)
    return quantized(net, (frame(60),))


@pytest.mark.parametrize("dialect", ["libspconv", "portable"])
def test_a_number_of_voxels_that_the_forward_asks_about(dialect: str, tmp_path: Path) -> None:
    model, file, lowered = encoder(False), tmp_path / "net.onnx", tmp_path / "portable.onnx"
    export_sparse_onnx(model, (frame(60),), file, dialect=dialect)
    found = lint_onnx(file, dialect)
    assert [(f.id, f.node) for f in found] == [("ONX024", "coords")]
    assert "coords.shape[0] <= 100" in found[0].reason
    lower_to_portable(file, lowered)
    few, many = frame(90), frame(150)
    for path in (file, lowered):
        for backend in ("auto", "onnxruntime"):
            runner = load_sparse_onnx(path, backend=backend)
            runner(few.features, few.indices)
            with pytest.raises(ValueError, match=ASKED):
                runner(many.features, many.indices)
    run = open_onnx(lowered)
    run({"features": few.features, "coords": few.indices, "batch_size": 1})
    with pytest.raises(ValueError, match=ASKED):
        run({"features": many.features, "coords": many.indices, "batch_size": 1})


def test_a_dense_file_of_voxels_and_a_detector_keep_the_condition(tmp_path: Path) -> None:
    model = encoder(True)
    file = export_qdq_onnx(model, (frame(60),), tmp_path / "net.onnx", "onnxruntime")
    assert any("x.shape[0] <= 100" in note for note in file.notes)
    assert [f.id for f in lint_onnx(file.path, "onnxruntime")] == ["ONX024"]
    run = open_onnx(file.path, "onnxruntime")
    few, many = frame(90), frame(150)
    run(dict(zip(file.inputs, (few.features, few.indices), strict=True)))
    with pytest.raises(
        ValueError, match=r"x: expected x\.shape\[0\] <= 100, .*\.py:\d+, got shape"
    ):
        run(dict(zip(file.inputs, (many.features, many.indices), strict=True)))
    files = export_detector(model, (frame(60),), tmp_path / "detector", "onnxruntime")
    assert files.sparse is not None
    assert [f.id for f in files.findings] == ["ONX024"]
    with pytest.raises(ValueError, match=ASKED):
        load_sparse_onnx(files.sparse.path)(many.features, many.indices)


def test_damaged_metadata_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "net.onnx"
    export_sparse_onnx(encoder(False), (frame(60),), file, dialect="portable")
    model = onnx.load(file)
    entry = next(entry for entry in model.metadata_props if entry.key == "bevquant.guards")
    for text in ("{", "[1]", entry.value.replace("s0 <= 100", "open(s0)"), "[" * 9999):
        entry.value = text
        file.write_bytes(model.SerializeToString())
        with pytest.raises(ValueError, match=r"bevquant\.guards.* damaged"):
            load_sparse_onnx(file)
        with pytest.raises(ValueError, match=r"bevquant\.guards.* damaged"):
            open_onnx(file)
        assert [f.id for f in lint_onnx(file, "portable")] == ["ONX024"]


class Grid(nn.Module):
    def __init__(self, grid: Any) -> None:
        super().__init__()
        self.conv, self.grid = spconv.SubMConv3d(4, 8, 3, padding=1, bias=True), grid

    def forward(self, features: Tensor, coords: Tensor) -> Tensor:
        grid = self.grid(coords)
        return self.conv(spconv.SparseConvTensor(features, coords, grid, 1)).dense().flatten(1, 2)


@pytest.mark.parametrize("dialect", ["libspconv", "portable"])
@pytest.mark.parametrize(
    "grid",
    [
        lambda coords: [16, int(coords[:, 2].max()) + 1, 5],
        lambda coords: (coords[:, 1:].amax(0) + 1).tolist(),
        lambda coords: [(int(coords[:, 1].max()) // 8 + 1) * 8, 16, 5],
    ],
)
def test_a_grid_that_is_computed_from_coordinates(grid: Any, dialect: str, tmp_path: Path) -> None:
    net, x = Grid(grid), frame(60)
    use_bevquant_kernels(net)
    inputs = (x.features, x.indices)
    model = quantized(net, inputs)
    with pytest.raises(ValueError, match=r"spatial_shape .*computed from values.*\.py:\d+"):
        export_sparse_onnx(model, inputs, tmp_path / "net.onnx", dialect=dialect)
    assert not list(tmp_path.iterdir())
