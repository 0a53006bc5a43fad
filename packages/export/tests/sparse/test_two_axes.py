"""Sparse encoders of pillars, on two axes: files state one cell along the height."""

import pytest
import torch
from torch import nn

from bevquant_export import (
    compare_sparse_onnx,
    export_sparse_onnx,
    lint_onnx,
    load_sparse_onnx,
    lower_to_portable,
)
from bevquant_export.targets.autoware import export_autoware_onnx

GRID = [14, 11]


def pillars(seed):
    """Features and coordinates of 60 taken cells."""
    random = torch.Generator().manual_seed(seed)
    places = torch.randperm(GRID[0] * GRID[1], generator=random)[:60].sort()[0]
    coords = torch.stack([torch.zeros_like(places), places // GRID[1], places % GRID[1]], 1)
    return torch.randn(60, 5, generator=random), coords.int(), 1


def backbone(nets, *, dense):
    spconv = nets.spconv

    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = spconv.SubMConv2d(5, 8, 3, indice_key="stem")
            self.down = spconv.SparseConv2d(8, 12, 3, 2, padding=1, indice_key="down")
            self.same = spconv.SubMConv2d(12, 12, 3, indice_key="same")

        def forward(self, features, coords, batch_size):
            x = spconv.SparseConvTensor(features, coords, GRID, batch_size)
            x = self.down(self.stem(x))
            y = self.same(x)
            y = y.replace_feature(torch.relu(y.features + x.features))
            return y.dense() if dense else y

    torch.manual_seed(0)
    return nets.calibrated(Backbone().eval(), [pillars(0)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize(("model_order", "order"), [("zyx", "zyx"), ("xyz", "xyz"), ("zyx", "xyz")])
def test_a_file_of_pillars(nets, tmp_path, dense, model_order, order):
    model, path = backbone(nets, dense=dense), tmp_path / "pillars.onnx"
    export_sparse_onnx(model, pillars(0), path, model_order=model_order, order=order)
    assert [f for f in lint_onnx(path, "libspconv") if f.severity == "error"] == []
    file = load_sparse_onnx(path)
    assert file.grid == {"zyx": (1, 14, 11), "xyz": (14, 11, 1)}.get(model_order) or order == "xyz"
    turned = model_order != order
    rows = compare_sparse_onnx(file, model, pillars(1), reversed_axes=turned)
    assert [row.node for row in rows if row.different] == []
    assert rows[-1].node == "output"


def test_the_portable_form(nets, tmp_path):
    pytest.importorskip("onnxruntime")
    model, path = backbone(nets, dense=False), tmp_path / "pillars.onnx"
    export_sparse_onnx(model, pillars(0), path, model_order="zyx")
    lower_to_portable(path, tmp_path / "portable.onnx")
    file = load_sparse_onnx(tmp_path / "portable.onnx", backend="onnxruntime")
    rows = compare_sparse_onnx(file, model, pillars(1))
    assert [row.node for row in rows if row.different] == []


def test_the_plugin_of_autoware_has_three_axes(nets, tmp_path):
    with pytest.raises(ValueError, match=r"stem.*2 spatial axes"):
        export_autoware_onnx(backbone(nets, dense=False), pillars(0), tmp_path / "a.onnx")
